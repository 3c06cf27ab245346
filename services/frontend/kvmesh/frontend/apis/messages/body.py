"""Body of an Anthropic Messages request, and its translation into the internal form."""

from typing import Annotated, Any, Literal

from msgspec import Raw, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.frontend.apis.base import as_json, check_range
from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import inner_cache_control
from kvmesh.frontend.apis.chat.body import MAX_MESSAGES, MAX_TOOLS
from kvmesh.frontend.apis.messages.context_management import ContextManagement, to_edits
from kvmesh.frontend.apis.nvext import Nvext
from kvmesh.frontend.apis.sampling import MAX_TOKENS, stop_strings
from kvmesh.frontend.apis.sealed_reasoning import Sealed, SealedTooLong
from kvmesh.frontend.apis.tool_definitions import ToolDefinitions
from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    GenerateRequest,
    Image,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.retention.hints import CacheMark


class ImageSource(Struct):
    type: str = "base64"
    media_type: str = ""
    data: str = ""
    url: str = ""


class ChangedTool(Struct):
    """A tool by name, or the definition of one that `tools` does not list."""

    type: str
    name: str | None = None
    definition: "MessagesToolBody | None" = None


class Content(Struct):
    """Content block of any type; `type` selects the fields in use."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Content] | dict[str, Any] | None" = None
    is_error: bool | None = None
    source: ImageSource | None = None
    tool_name: str | None = None
    tool: ChangedTool | None = None
    title: str | None = None
    cache_control: CacheMark | None = None


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Content] = ""


class MessagesToolBody(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
    cache_control: CacheMark | None = None


class ToolChoiceBody(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Struct):
    """With the `display` "omitted" the answer has no texts of thinking; else it has all of them."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Struct):
    user_id: str | None = None


class Diagnostics(Struct):
    previous_message_id: str | None = None


class MessagesBody(Struct, kw_only=True):
    """Fields of the Messages API and of token counting. Ignores unknown fields."""

    model: str
    messages: list[InputMessage]
    max_tokens: int | None = None
    system: str | list[Content] | None = None
    tools: list[Annotated[Raw, defined_as(MessagesToolBody)]] | None = None
    tool_choice: ToolChoiceBody | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: ThinkingBody | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: Metadata | None = None
    cache_control: CacheMark | None = None
    diagnostics: Diagnostics | None = None
    nvext: Nvext | None = None


def to_request(body: MessagesBody, request_id: str) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field."""
    if not body.messages:
        raise InvalidRequest("messages: at least one message is required", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: more than {MAX_MESSAGES} entries", "messages")
    if len(body.tools or []) > MAX_TOOLS:
        raise InvalidRequest(f"tools: more than {MAX_TOOLS} entries", "tools")
    choice, sealed = body.tool_choice, Sealed()
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=_sampling(body),
        messages=_messages(body, sealed),
        tools=_tools(body),
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        guided=_guided(body),
        template_args=_arguments(body),
        thinking=_thinking(body.thinking),
        stream=bool(body.stream),
        context_edits=to_edits(body.context_management),
        body_bytes=sealed.bytes,
    )


def _sampling(body: MessagesBody) -> Sampling:
    check_range(body.max_tokens, 1, MAX_TOKENS, "max_tokens")
    check_range(body.temperature, 0, 2, "temperature")
    check_range(body.top_p, 0, 1, "top_p")
    check_range(body.top_k, -1, MAX_TOKENS, "top_k")
    return Sampling(
        max_tokens=body.max_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        stop=stop_strings(body.stop_sequences, "stop_sequences"),
    )


def _messages(body: MessagesBody, sealed: Sealed) -> list[Message]:
    system = _blocks(body.system or "", "system", sealed)
    found = [Message("system", system)] if system else []
    for index, message in enumerate(body.messages):
        blocks = _blocks(message.content, f"messages.{index}.content", sealed)
        found.append(Message(message.role, blocks))
    return found


def _blocks(content: str | list[Content], where: str, sealed: Sealed) -> list[Block]:
    """Blocks of a content; a string is one text block, so that both forms render alike."""
    if isinstance(content, str):
        return [Text(content)] if content else []
    blocks = [_block(block, f"{where}.{index}", sealed) for index, block in enumerate(content)]
    return [block for block in blocks if block is not None]


def _block(block: Content, where: str, sealed: Sealed) -> Block | None:
    """The internal block; None for types that a prompt cannot hold (hosted tools, redactions)."""
    cache = _cache(block.cache_control)
    if block.type == "text":
        return Text(block.text or "", cache)
    if block.type == "thinking":
        return Thinking(_thinking_text(block, where, sealed), block.signature or "")
    if block.type == "tool_use":
        if not block.name:
            raise InvalidRequest(f"{where}.name: field required", f"{where}.name")
        return ToolCall(block.id or "", block.name, as_json(block.input or {}), cache=cache)
    if block.type == "tool_result":
        return _result(block, where, cache, sealed)
    if block.type == "image":
        return _image(block, where, cache)
    if block.type in ("document", "search_result"):
        return _document(block, where, cache, sealed)
    if block.type in ("tool_addition", "tool_removal") and block.tool is not None:
        return _notice(block.tool, block.type == "tool_removal")
    return None


def _thinking_text(block: Content, where: str, sealed: Sealed) -> str:
    """The text, which the signature carries if it was omitted from the answer."""
    try:
        return block.thinking or sealed.open(block.signature)
    except SealedTooLong:
        where = f"{where}.signature"
        raise InvalidRequest(f"{where}: too long when decompressed", where) from None


def _notice(changed: ChangedTool, removed: bool) -> ToolNotice | None:
    name = changed.definition.name if changed.definition is not None else changed.name
    return ToolNotice(name, removed) if name else None


def _result(block: Content, where: str, cache: CacheControl | None, sealed: Sealed) -> ToolResult:
    if not block.tool_use_id:
        raise InvalidRequest(f"{where}.tool_use_id: field required", f"{where}.tool_use_id")
    parts = block.content if isinstance(block.content, str | list) else ""
    blocks = _blocks(parts, f"{where}.content", sealed)
    content = [b for b in blocks if isinstance(b, Text | Image)]
    listed = parts if isinstance(parts, list) else []
    names = [b.tool_name for b in listed if b.type == "tool_reference" and b.tool_name]
    cache = cache or inner_cache_control(content)
    return ToolResult(block.tool_use_id, content, bool(block.is_error), names, cache)


def _image(block: Content, where: str, cache: CacheControl | None) -> Image:
    source = block.source
    if source is None:
        raise InvalidRequest(f"{where}.source: field required", f"{where}.source")
    return Image(source.url or f"data:{source.media_type};base64,{source.data}", cache)


def _document(block: Content, where: str, cache: CacheControl | None, sealed: Sealed) -> Text:
    """A text document; raises InvalidRequest for other kinds."""
    if block.source is not None and block.source.type == "text":
        return Text(block.source.data, cache)
    parts = block.content if isinstance(block.content, str | list) else ""
    texts = [b.text for b in _blocks(parts, where, sealed) if isinstance(b, Text)]
    if not texts:
        raise InvalidRequest(f"{where}: only text documents are supported", where)
    return Text("\n".join([block.title or "", *texts]).strip(), cache)


def _cache(mark: CacheMark | None) -> CacheControl | None:
    return CacheControl(mark.ttl_s()) if mark is not None else None


def _tools(body: MessagesBody) -> list[Tool]:
    """The tools of `tools`, then those defined in the conversation, which are deferred."""
    found = _definitions.tools(body.tools or [])
    known = {tool.name for tool in found}
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else []:
            defined = block.tool.definition if block.tool is not None else None
            if defined is not None and defined.input_schema is not None:
                if defined.name not in known:
                    found.append(replace(_tool(defined), deferred=True))
                known.add(defined.name)
    return found


def _tool(tool: MessagesToolBody) -> Tool:
    return Tool(
        tool.name,
        tool.description or "",
        tool.input_schema or {},
        strict=bool(tool.strict),
        deferred=bool(tool.defer_loading),
        cache=_cache(tool.cache_control),
    )


def _listed(tool: MessagesToolBody) -> list[Tool]:
    """The tool, but for one of Anthropic's own, which has no schema."""
    return [_tool(tool)] if tool.input_schema is not None else []


_definitions = ToolDefinitions(MessagesToolBody, _listed)


def _choice(choice: ToolChoiceBody | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name: field required", "tool_choice.name")
        return ToolChoice("required", (choice.name,))
    return ToolChoice("required" if choice.type == "any" else "none")


def _guided(body: MessagesBody) -> Guided | None:
    form = body.output_format or (body.output_config.format if body.output_config else None)
    if form is None or form.type != "json_schema":
        return None
    if form.schema is None:
        raise InvalidRequest("output_format.schema: field required", "output_format.schema")
    return Guided(kind="json_schema", value=as_json(form.schema))


def _thinking(thinking: ThinkingBody | None) -> bool | None:
    """True if thinking is enabled; None ("adaptive") for the model's default."""
    if thinking is None or thinking.type == "adaptive":
        return None
    return thinking.type == "enabled"


def _arguments(body: MessagesBody) -> dict[str, Any]:
    config = body.output_config
    return {"reasoning_effort": config.effort} if config and config.effort else {}
