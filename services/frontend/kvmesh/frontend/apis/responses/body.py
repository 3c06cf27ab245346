"""Body of a Responses request, and its translation into the internal form."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw, Struct

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.frontend.apis.base import as_json, check_range, decode
from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import (
    CacheBreakpoint,
    CacheOptions,
    CacheRetention,
    inner_cache_control,
    to_cache_control,
)
from kvmesh.frontend.apis.chat.body import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedTool,
    allowed_choice,
)
from kvmesh.frontend.apis.nvext import Nvext
from kvmesh.frontend.apis.responses.references import ItemHead
from kvmesh.frontend.apis.sampling import MAX_TOKENS
from kvmesh.frontend.apis.sealed_reasoning import Sealed, SealedTooLong
from kvmesh.frontend.apis.tool_definitions import ToolDefinitions
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Image,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest

ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class ResponsesPart(Struct, omit_defaults=True):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Item(ItemHead, omit_defaults=True):
    """Input item of any type; `type`, optional in messages, selects the fields in use."""

    status: str | None = None
    content: str | list[ResponsesPart] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[ResponsesPart] | dict[str, Any] | None = None
    summary: list[ResponsesPart] | None = None
    encrypted_content: str | None = None


class ResponsesToolBody(Struct):
    """A tool, or a namespace with its functions in `tools`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    defer_loading: bool | None = None
    tools: "list[ResponsesToolBody] | None" = None


class ResponsesToolChoice(Struct, omit_defaults=True):
    """A named tool, or with the type `allowed_tools` several."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(Struct):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextBody(Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningBody(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Struct, kw_only=True):
    """Fields of the Responses API. Ignores unknown fields."""

    model: str
    input: str | list[Raw] = msgspec.field(default_factory=list)
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[Annotated[Raw, defined_as(ResponsesToolBody)]] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    background: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: CacheOptions | None = None
    nvext: Nvext | None = None


_item = msgspec.json.Decoder(Item)


def to_request(body: ResponsesBody, request_id: str) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field."""
    _check(body)
    reasoning = body.reasoning or ReasoningBody()
    sealed = Sealed()
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=_sampling(body),
        messages=[*instructions(body), *to_messages(input_items(body), sealed)],
        tools=_definitions.tools(body.tools or []),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        guided=_guided(body.text),
        template_args={"reasoning_effort": reasoning.effort} if reasoning.effort else {},
        thinking=False if reasoning.effort == "none" else None,
        stream=bool(body.stream),
        body_bytes=sealed.bytes,
    )


def _check(body: ResponsesBody) -> None:
    if not body.input and not body.previous_response_id:
        raise InvalidRequest("`input` must not be empty.", "input")
    if len(body.input) > MAX_MESSAGES and not isinstance(body.input, str):
        raise InvalidRequest(f"`input` has more than {MAX_MESSAGES} items.", "input")
    if len(body.tools or []) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` has more than {MAX_TOOLS} entries.", "tools")
    if body.background:
        raise InvalidRequest("`background` responses are not supported.", "background")


def _sampling(body: ResponsesBody) -> Sampling:
    check_range(body.max_output_tokens, 1, MAX_TOKENS, "max_output_tokens")
    check_range(body.temperature, 0, 2, "temperature")
    check_range(body.top_p, 0, 1, "top_p")
    check_range(body.top_logprobs, 0, MAX_LOGPROBS, "top_logprobs")
    wanted = body.top_logprobs or "message.output_text.logprobs" in (body.include or [])
    return Sampling(
        max_tokens=body.max_output_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        logprobs=(body.top_logprobs or 0) if wanted else None,
    )


def input_items(body: ResponsesBody) -> list[Raw]:
    """The input as items; a string is one user message."""
    if isinstance(body.input, str):
        return [Raw(msgspec.json.encode({"role": "user", "content": body.input}))]
    return list(body.input)


def to_messages(items: list[Raw], sealed: Sealed) -> list[Message]:
    """One message per item, without ids and metadata; none for a reference, yet to be resolved."""
    found = []
    for index, raw in enumerate(items):
        where = f"input[{index}]"
        message = _message(decode(_item, bytes(raw), where), where, sealed)
        if message is not None and message.blocks:
            found.append(message)
    return found


def storable_items(items: list[Raw]) -> list[Raw]:
    """The input items to store: references and what a prompt can hold, without unknown fields."""
    sealed = Sealed()
    return [
        Raw(msgspec.json.encode(item))
        for item in map(_item.decode, items)
        if _message(item, "input", sealed) is not None or item.is_reference
    ]


def instructions(body: ResponsesBody) -> list[Message]:
    return [Message("system", [Text(body.instructions)])] if body.instructions else []


def _message(item: Item, where: str, sealed: Sealed) -> Message | None:
    """The internal message; None for kinds of items that a prompt cannot hold."""
    kind = item.type or ("message" if item.role else None)
    if kind == "message":
        if item.role not in ROLES:
            raise InvalidRequest(f"`{where}.role`: unknown role {item.role!r}.", f"{where}.role")
        return Message(ROLES[item.role], _content(item.content, where))
    if kind == "function_call" or kind == "custom_tool_call":
        return Message("assistant", [_call(item, where)])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", [_result(item, where)])
    if kind == "reasoning":
        thinking = _thinking(item, where, sealed)
        return Message("assistant", [Thinking(thinking)]) if thinking else None
    if item.is_reference:
        if not item.id:
            raise InvalidRequest(f"`{where}.id`: missing.", f"{where}.id")
        return None
    if kind is None:
        raise InvalidRequest(f"`{where}.type`: missing.", f"{where}.type")
    return None


def _content(content: str | list[ResponsesPart] | None, where: str) -> list[Block]:
    if isinstance(content, str):
        return [Text(content)] if content else []
    return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content or [])]


def _part(part: ResponsesPart, where: str) -> Block:
    cache = to_cache_control(part.prompt_cache_breakpoint)
    if part.type in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        return Text(part.text or "", cache)
    if part.type == "refusal":
        return Text(part.refusal or "")
    if part.type in ("input_image", "image_url"):
        url = part.image_url
        return Image(url if isinstance(url, str) else str((url or {}).get("url", "")), cache)
    raise InvalidRequest(f"`{where}`: type `{part.type}` is not supported.", f"{where}.type")


def _call(item: Item, where: str) -> ToolCall:
    if not item.name:
        raise InvalidRequest(f"`{where}.name`: missing.", f"{where}.name")
    if item.type == "custom_tool_call":
        return ToolCall(item.call_id or "", item.name, item.input or "", item.namespace, True)
    given = item.arguments
    text = given if isinstance(given, str) else as_json(given or {})
    return ToolCall(item.call_id or "", item.name, text, item.namespace)


def _result(item: Item, where: str) -> ToolResult:
    if not item.call_id:
        raise InvalidRequest(f"`{where}.call_id`: missing.", f"{where}.call_id")
    output = item.output
    if isinstance(output, dict):
        output = as_json(output)
    blocks = _content(output, f"{where}.output")
    content = [b for b in blocks if isinstance(b, Text | Image)]
    return ToolResult(item.call_id, content, cache=inner_cache_control(content))


def _thinking(item: Item, where: str, sealed: Sealed) -> str:
    """The full text if the item has it in any form, else the summary."""
    parts = item.content if isinstance(item.content, list) else []
    full = "".join(part.text or "" for part in parts)
    try:
        full = full or sealed.open(item.encrypted_content)
    except SealedTooLong:
        reason = f"`{where}.encrypted_content`: too long when decompressed."
        raise InvalidRequest(reason, f"{where}.encrypted_content") from None
    return full or "\n".join(part.text or "" for part in item.summary or [])


def _tools(tool: ResponsesToolBody) -> list[Tool]:
    """A function or custom tool, or the functions of a namespace; nothing of a hosted tool."""
    listed, space = ([tool], None) if tool.type != "namespace" else (tool.tools or [], tool.name)
    return [made for each in listed if (made := _one_tool(each, space)) is not None]


def _one_tool(tool: ResponsesToolBody, namespace: str | None) -> Tool | None:
    if not tool.name:
        return None
    description = tool.description or ""
    if tool.type == "custom":
        form = tool.format or {}
        grammar, regex = form.get("definition"), form.get("syntax") == "regex"
        text = grammar if isinstance(grammar, str) else None
        return Tool(tool.name, description, {}, namespace, custom=True, grammar=text, regex=regex)
    if tool.type != "function":
        return None
    return Tool(
        tool.name,
        description,
        tool.parameters or {},
        namespace,
        strict=bool(tool.strict),
        deferred=bool(tool.defer_loading),
    )


_definitions = ToolDefinitions(ResponsesToolBody, _tools)


def _choice(choice: str | ResponsesToolChoice | None) -> ToolChoice:
    if isinstance(choice, ResponsesToolChoice):
        if choice.type in ("function", "custom") and choice.name:
            return ToolChoice("required", (choice.name,))
        if choice.type != "allowed_tools":
            reason = f"`tool_choice`: no tool of type `{choice.type}` can be called here."
            raise InvalidRequest(reason, "tool_choice")
        return allowed_choice(choice.mode or "auto", choice.tools or [])
    if choice == "required":
        return ToolChoice("required")
    return ToolChoice("none") if choice == "none" else ToolChoice()


def _guided(text: TextBody | None) -> Guided | None:
    form = text.format if text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guided(kind="json_object", value="")
    if form.type != "json_schema":
        raise InvalidRequest(f"`text.format.type`: unknown `{form.type}`.", "text.format.type")
    if form.schema is None:
        raise InvalidRequest("`text.format.schema`: missing.", "text.format.schema")
    return Guided(kind="json_schema", value=as_json(form.schema))
