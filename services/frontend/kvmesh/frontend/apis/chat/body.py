"""Body of a chat completion request, and its translation into the internal form."""

from typing import Annotated, Any, Literal

from msgspec import Raw, Struct

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.frontend.apis.base import as_json, check_range
from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import (
    CacheBreakpoint,
    CacheOptions,
    CacheRetention,
    inner_cache_control,
    to_cache_control,
)
from kvmesh.frontend.apis.nvext import Nvext
from kvmesh.frontend.apis.sampling import SamplingBody, to_sampling
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

MAX_MESSAGES = 20_000
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TOOLS = 4096


class ChatPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Function(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class Custom(Struct):
    name: str
    input: str = ""


class ChatToolCall(Struct):
    id: str = ""
    type: str = "function"
    function: Function | None = None
    custom: Custom | None = None


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ChatPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionTool(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(Struct):
    definition: str | None = None
    syntax: str | None = None


class CustomFormat(Struct):
    grammar: Grammar | None = None


class CustomTool(Struct):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ChatToolBody(Struct):
    type: str
    function: FunctionTool | None = None
    custom: CustomTool | None = None


ToolList = list[Annotated[Raw, defined_as(ChatToolBody)]]


class StreamOptions(Struct):
    include_usage: bool | None = None


class JsonSchema(Struct):
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchema | None = None


class NamedFunction(Struct):
    name: str


class AllowedTool(Struct, omit_defaults=True):
    """A tool by its name, or a hosted one without."""

    type: str
    name: str | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class ChatAllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ChatToolChoice(Struct):
    """A named tool, or with `allowed_tools` several."""

    type: str = "function"
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: ChatAllowedTools | None = None


class ChatBody(SamplingBody, kw_only=True):
    """Fields of the OpenAI API, and of vLLM those that agents use. Ignores unknown fields."""

    model: str
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ToolList | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: CacheOptions | None = None
    nvext: Nvext | None = None


def to_request(body: ChatBody, request_id: str) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field."""
    _check(body)
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=_sampling(body),
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)],
        tools=_definitions.tools(body.tools or []),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        guided=guided(body.response_format),
        template_args=arguments,
        stream=bool(body.stream),
        n=body.n or 1,
    )


def _check(body: ChatBody) -> None:
    if not body.messages:
        raise InvalidRequest("`messages` must not be empty.", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"`messages` has more than {MAX_MESSAGES} entries.", "messages")
    if len(body.tools or []) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` has more than {MAX_TOOLS} entries.", "tools")
    check_range(body.n, 1, MAX_CHOICES, "n")


def _sampling(body: ChatBody) -> Sampling:
    limit = body.max_completion_tokens
    check_range(body.top_logprobs, 0, MAX_LOGPROBS, "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return to_sampling(body, body.max_tokens if limit is None else limit, logprobs)


def _message(message: ChatMessage, where: str) -> Message:
    if message.role in ("system", "developer"):
        return Message("system", _content(message.content, where))
    if message.role == "user":
        return Message("user", _content(message.content, where))
    if message.role == "assistant":
        return Message("assistant", _assistant(message, where))
    if not message.tool_call_id and message.role == "tool":
        raise InvalidRequest("A tool message requires `tool_call_id`.", f"{where}.tool_call_id")
    content = [b for b in _content(message.content, where) if isinstance(b, Text | Image)]
    call = message.tool_call_id or message.name or ""
    return Message("tool", [ToolResult(call, content, cache=inner_cache_control(content))])


def _assistant(message: ChatMessage, where: str) -> list[Block]:
    thinking = message.reasoning_content or message.reasoning
    blocks: list[Block] = [Thinking(thinking)] if thinking else []
    blocks += _content(message.content, where)
    for index, call in enumerate(message.tool_calls or []):
        blocks.append(_tool_call(call, f"{where}.tool_calls[{index}]"))
    return blocks


def _tool_call(call: ChatToolCall, where: str) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.id, call.custom.name, call.custom.input, custom=True)
    if call.function is None:
        raise InvalidRequest("A tool call requires `function`.", f"{where}.function")
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else as_json(arguments or {})
    return ToolCall(call.id, call.function.name, text)


def _content(content: str | list[ChatPart] | None, where: str) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)] if content else []
    return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _part(part: ChatPart, where: str) -> Block:
    cache = to_cache_control(part.prompt_cache_breakpoint)
    if part.type in ("text", "input_text", "output_text"):
        return Text(part.text or "", cache)
    if part.type == "refusal":
        return Text(part.refusal or "")
    if part.type == "image_url":
        url = part.image_url
        return Image(url if isinstance(url, str) else str((url or {}).get("url", "")), cache)
    raise InvalidRequest(f"Content of type `{part.type}` is not supported.", f"{where}.type")


def _tools(tool: ChatToolBody) -> list[Tool]:
    """A function or custom tool; nothing of a hosted one."""
    if tool.function is not None:
        f = tool.function
        return [Tool(f.name, f.description or "", f.parameters or {}, strict=bool(f.strict))]
    if tool.custom is not None:
        c = tool.custom
        grammar = c.format.grammar if c.format and c.format.grammar else Grammar()
        description, regex = c.description or "", grammar.syntax == "regex"
        text = grammar.definition
        return [Tool(c.name, description, {}, custom=True, grammar=text, regex=regex)]
    return []


_definitions = ToolDefinitions(ChatToolBody, _tools)


def _choice(choice: str | ChatToolChoice | None) -> ToolChoice:
    if isinstance(choice, ChatToolChoice):
        if choice.allowed_tools is not None:
            return allowed_choice(choice.allowed_tools.mode, choice.allowed_tools.tools)
        named = choice.function or choice.custom
        if named is None:
            raise InvalidRequest("A named tool choice requires `function`.", "tool_choice.function")
        return ToolChoice("required", (named.name,))
    if choice in ("none", "required"):
        return ToolChoice(choice)  # type: ignore[arg-type]  # narrowed by the line above
    return ToolChoice()


def allowed_choice(mode: Literal["auto", "required"], tools: list[AllowedTool]) -> ToolChoice:
    """A choice among these tools, of which hosted ones are left out as those of the request are."""
    names: list[str] = []
    for index, tool in enumerate(tools):
        named = tool.function or tool.custom
        name = named.name if named is not None else tool.name
        if tool.type not in ("function", "custom"):
            continue
        if not name:
            raise InvalidRequest("An allowed tool requires a name.", f"tool_choice.tools[{index}]")
        names.append(name)
    return ToolChoice(mode, tuple(names))


def guided(form: ResponseFormat | None) -> Guided | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guided(kind="json_object", value="")
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise InvalidRequest("`json_schema.schema` is missing.", "response_format.json_schema")
        return Guided(kind="json_schema", value=as_json(form.json_schema.schema))
    raise InvalidRequest(f"Unknown type `{form.type}`.", "response_format.type")
