"""Body of a chat completion request, and its translation into the internal form."""

from typing import Annotated, Any, Literal

from msgspec import Raw, Struct

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.apis.base import as_json, check_length, check_range, missing
from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import (
    CacheOptions,
    CacheRetention,
    inner_cache_control,
)
from kvmesh.frontend.apis.content.constraints import constraint
from kvmesh.frontend.apis.content.foreign import with_sources
from kvmesh.frontend.apis.content.parts import Content, answer_blocks, content_blocks
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.apis.content.tagged import Reading
from kvmesh.frontend.apis.nvext import Nvext
from kvmesh.frontend.apis.openai import StreamOptions
from kvmesh.frontend.apis.sampling import MAX_TOKENS, Effort, SamplingBody, to_sampling
from kvmesh.frontend.apis.tool_definitions import ToolDefinitions
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import (
    GAP,
    Block,
    GenerateRequest,
    Message,
    ResultPart,
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
OF_ANSWERS = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal"),
    *("annotations", "prefix", "partial"),
)
SPEAKERS = ("system", "developer", "user")  # whose messages have a content
NOT_OF_ANSWERS = ("tool_call_id",)
SWITCHES = {"enable_thinking", "thinking"}  # of thinking, in chat templates
OWN_TOOLS = ("function", "custom")
TOOL_CHOICES = (*OWN_TOOLS, "allowed_tools")


class Function(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class Custom(Struct):
    name: str
    input: str = ""


class ChatToolCall(Struct):
    id: str | None = None
    type: str = "function"
    function: Function | None = None
    custom: Custom | None = None


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    function_call: Function | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    prefix: bool | None = None
    partial: bool | None = None


class FunctionTool(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(Struct):
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None


class CustomFormat(Struct):
    type: Literal["text", "grammar"] | None = None
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
    """Fields of the OpenAI API, and of vLLM those that agents use. Ignores unknown fields.

    The model continues an assistant message at the end if `continue_final_message` or the message's
    `prefix` or `partial` says so.
    """

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
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: CacheOptions | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    max_output_tokens: Any = None
    system: Any = None
    instructions: Any = None
    nvext: Nvext | None = None


UNSUPPORTED = UnsupportedFields(
    functions="tools",
    function_call="tool_choice",
    max_output_tokens="max_completion_tokens",
    audio=None,
    chat_template=None,
    documents="chat_template_kwargs",
    echo=None,
    system="messages",
    instructions="messages",
)


def to_request(body: ChatBody, request_id: str, turn: TurnBody) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field.

    `body` lacks the messages that `turn` knows.
    """
    _check(body, turn.count)
    reading = Reading()
    new = [
        [_message(message, f"messages[{index}]", reading)]
        for index, message in enumerate(body.messages, turn.count)
    ]
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=_sampling(body),
        messages=turn.make(new, reading),
        tools=_definitions.tools(body.tools or [], reading.skipped),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        guided=constraint(body),
        template_args=_arguments(body),
        thinking=_thinking(body),
        thinking_budget=body.thinking_token_budget,
        token_names=bool(body.return_tokens_as_token_ids),
        stream=bool(body.stream),
        n=body.n or 1,
        ignored=reading.skipped,
    )


def _check(body: ChatBody, known: int) -> None:
    check_length(known + len(body.messages), 1, MAX_MESSAGES, "messages")
    check_length(len(body.tools or []), 0, MAX_TOOLS, "tools")
    check_range(body.n, 1, MAX_CHOICES, "n")
    check_range(body.max_completion_tokens, 1, MAX_TOKENS, "max_completion_tokens")
    check_range(body.thinking_token_budget, 0, MAX_TOKENS, "thinking_token_budget")
    UNSUPPORTED.refuse(body)
    if any(modality != "text" for modality in body.modalities or ()):
        raise InvalidRequest("`modalities`: the model writes text only.", "modalities")


def _thinking(body: ChatBody) -> bool | None:
    """False if no effort is wanted, unless the template's own switch says otherwise."""
    if body.reasoning_effort != "none" or SWITCHES & (body.chat_template_kwargs or {}).keys():
        return None
    return False


def _arguments(body: ChatBody) -> dict[str, Any]:
    """The variables of the template."""
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    last = body.messages[-1]
    continues = body.continue_final_message or bool(last.prefix or last.partial)
    if continues and body.add_generation_prompt:
        reason = "`add_generation_prompt` and `continue_final_message` exclude each other."
        raise InvalidRequest(reason, "continue_final_message")
    if body.add_generation_prompt is not None:
        arguments["add_generation_prompt"] = body.add_generation_prompt
    if continues:
        arguments["continue_final_message"] = True
    return arguments


def _sampling(body: ChatBody) -> Sampling:
    limit = body.max_completion_tokens
    check_range(body.top_logprobs, 0, MAX_LOGPROBS, "top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("`top_logprobs` requires `logprobs`: true.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return to_sampling(body, body.max_tokens if limit is None else limit, logprobs)


def _message(message: ChatMessage, where: str, reading: Reading) -> Message:
    if message.name and message.role in ("system", "developer", "assistant"):
        reading.skipped.append(f"{where}.name")
    if message.role == "assistant":
        return Message("assistant", _assistant(message, where, reading))
    if message.content is None and message.role in SPEAKERS:
        raise missing(f"{where}.content")
    content = content_blocks(message.content, f"{where}.content", reading)
    if message.role in ("system", "developer"):
        return Message("system", list(content))
    if message.role == "user":
        return Message("user", _named(message.name, content))
    if not message.tool_call_id and message.role == "tool":
        raise missing(f"{where}.tool_call_id")
    call = message.tool_call_id or message.name
    if not call:
        raise missing(f"{where}.name")
    return Message("tool", [ToolResult(call, content, cache=inner_cache_control(content))])


def without_effect(body: ChatBody) -> list[str]:
    """Paths of the fields that messages of their roles do not have."""
    found = []
    for index, message in enumerate(body.messages):
        others = NOT_OF_ANSWERS if message.role == "assistant" else OF_ANSWERS
        found += [f"messages[{index}].{name}" for name in others if getattr(message, name)]
    return found


def _named(name: str | None, content: list[ResultPart]) -> list[Block]:
    """The content of a participant, whom templates cannot name."""
    blocks: list[Block] = [*content]
    if name:
        first = blocks[0] if blocks else None
        if isinstance(first, Text):
            blocks[0] = Text(f"{name}: {first.text}", first.cache)
        else:
            blocks.insert(0, Text(f"{name}:"))
    return blocks


def _assistant(message: ChatMessage, where: str, reading: Reading) -> list[Block]:
    content = answer_blocks(message.content, f"{where}.content", reading)
    thinking = message.reasoning_content or message.reasoning
    blocks: list[Block] = []
    if thinking and Thinking(thinking) not in content:  # some clients send it in both places
        blocks.append(Thinking(thinking))
    blocks += content
    if message.annotations and content and isinstance(last := content[-1], Text):
        blocks[-1] = Text(with_sources(last.text, message.annotations), last.cache)
    if message.refusal:
        if content:
            blocks.append(Text(GAP))
        blocks.append(Text(message.refusal))
    if message.function_call is not None:
        called = message.function_call
        blocks.append(ToolCall(called.name, called.name, _written(called.arguments)))
    for index, call in enumerate(message.tool_calls or []):
        blocks.append(_tool_call(call, f"{where}.tool_calls[{index}]"))
    return blocks


def _tool_call(call: ChatToolCall, where: str) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.id or "", call.custom.name, call.custom.input, custom=True)
    if call.function is None:
        raise missing(f"{where}.function")
    return ToolCall(call.id or "", call.function.name, _written(call.function.arguments))


def _written(arguments: str | dict[str, Any] | None) -> str:
    return arguments if isinstance(arguments, str) else as_json(arguments or {})


def _tools(tool: ChatToolBody, where: str) -> list[Tool]:
    """A function or custom tool; nothing of a hosted one."""
    if tool.function is not None:
        f = tool.function
        if not f.name:
            raise missing(f"{where}.function.name")
        return [Tool(f.name, f.description or "", f.parameters or {}, strict=bool(f.strict))]
    if tool.custom is not None:
        c = tool.custom
        if not c.name:
            raise missing(f"{where}.custom.name")
        grammar = c.format.grammar if c.format and c.format.grammar else Grammar()
        description, regex = c.description or "", grammar.syntax == "regex"
        text = grammar.definition
        return [Tool(c.name, description, {}, custom=True, grammar=text, regex=regex)]
    if tool.type in OWN_TOOLS:
        raise missing(f"{where}.{tool.type}")
    return []


_definitions = ToolDefinitions(ChatToolBody, OWN_TOOLS, _tools)


def _choice(choice: str | ChatToolChoice | None) -> ToolChoice:
    if isinstance(choice, ChatToolChoice):
        if choice.allowed_tools is not None:
            return allowed_choice(choice.allowed_tools.mode, choice.allowed_tools.tools)
        named = choice.function or choice.custom
        if choice.type not in TOOL_CHOICES:
            reason = f"`tool_choice.type`: unknown `{choice.type}`."
            raise InvalidRequest(reason, "tool_choice.type")
        if named is None:
            raise missing(f"tool_choice.{choice.type}")
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
            raise missing(f"tool_choice.tools[{index}].name")
        names.append(name)
    return ToolChoice(mode, tuple(names))
