"""Body of an Anthropic Messages request, and its translation into the internal form."""

from typing import Annotated, Any, Literal

from msgspec import Raw, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.frontend.apis.base import as_json, check_range, missing
from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import CACHE_ALONE
from kvmesh.frontend.apis.chat.body import MAX_MESSAGES, MAX_TOOLS
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.apis.faults import MISSING
from kvmesh.frontend.apis.messages.blocks import (
    BlockContent,
    MessagesReading,
    to_blocks,
    to_messages,
)
from kvmesh.frontend.apis.messages.client_tools import OWN_TYPES, MessagesToolBody, listed
from kvmesh.frontend.apis.messages.context_management import ContextManagement, to_edits
from kvmesh.frontend.apis.nvext import Nvext
from kvmesh.frontend.apis.sampling import MAX_TOKENS, stop_strings
from kvmesh.frontend.apis.tool_definitions import ToolDefinitions
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import GenerateRequest, Message, Text, Tool, ToolChoice
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.retention.hints import CacheMark


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: BlockContent


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
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Struct):
    user_id: str | None = None


class Diagnostics(Struct):
    previous_message_id: str | None = None


class MessagesBody(Struct, kw_only=True):
    """Fields of the Messages API and of token counting. Ignores unknown fields.

    The model continues an assistant message at the end if that ends with text.
    """

    model: str
    messages: list[InputMessage]
    max_tokens: int | None = None
    system: BlockContent | None = None
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
    compaction: Any = None
    container: Any = None
    mcp_servers: Any = None
    response_format: Any = None
    stop: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    functions: Any = None
    reasoning_effort: Any = None
    thread: Any = None
    nvext: Nvext | None = None


UNSUPPORTED = UnsupportedFields(
    compaction=None,
    container=None,
    mcp_servers=None,
    response_format="output_config.format",
    stop="stop_sequences",
    max_completion_tokens="max_tokens",
    max_output_tokens="max_tokens",
    functions="tools",
    reasoning_effort="output_config.effort",
)


def to_request(body: MessagesBody, request_id: str, turn: TurnBody) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field.

    `body` lacks the messages that `turn` knows.
    """
    if not body.messages:
        raise InvalidRequest("messages: at least one message is required", "messages")
    if turn.count + len(body.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: more than {MAX_MESSAGES} entries", "messages")
    if len(body.tools or []) > MAX_TOOLS:
        raise InvalidRequest(f"tools: more than {MAX_TOOLS} entries", "tools")
    UNSUPPORTED.refuse(body)
    choice, reading = body.tool_choice, MessagesReading()
    messages = _messages(body, reading, turn)
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=_sampling(body),
        messages=messages,
        tools=_tools(body, reading),
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        guided=_guided(body),
        template_args=_arguments(body, messages[-1]),
        thinking=_thinking(body.thinking),
        thinking_budget=_budget(body.thinking),
        stream=bool(body.stream),
        context_edits=to_edits(body.context_management),
        body_bytes=reading.sealed.bytes,
        ignored=reading.skipped,
    )


def _sampling(body: MessagesBody) -> Sampling:
    if body.max_tokens == 0:  # the vendor's API then only caches the prompt
        raise InvalidRequest(f"max_tokens: must be at least 1; {CACHE_ALONE}", "max_tokens")
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


def _messages(body: MessagesBody, reading: MessagesReading, turn: TurnBody) -> list[Message]:
    system = to_blocks(body.system or "", "system", reading)
    new = [
        to_messages(message.role, message.content, f"messages.{index}.content", reading)
        for index, message in enumerate(body.messages, turn.count)
    ]
    messages = turn.make(new, reading)
    return [turn.memo.same("system", Message("system", system)), *messages] if system else messages


def _tools(body: MessagesBody, reading: MessagesReading) -> list[Tool]:
    """The tools of `tools`, then those defined in the conversation, which are deferred."""
    found = _definitions.tools(body.tools or [], reading.skipped)
    known = {tool.name for tool in found}
    if len(known) < len(found):
        raise InvalidRequest("tools: Tool names must be unique.", "tools")
    for tool in (
        tool for defined in reading.defined for tool in listed(defined, "tool.definition")
    ):
        if tool.name not in known:
            known.add(tool.name)
            found.append(replace(tool, deferred=True))
    return found


_BUDGET = "thinking.budget_tokens"
SWITCHES = {"enabled": True, "disabled": False, "adaptive": None}  # types of thinking
_definitions = ToolDefinitions(MessagesToolBody, OWN_TYPES, listed)


def _choice(choice: ToolChoiceBody | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "tool":
        if not choice.name:
            raise missing("tool_choice.name")
        return ToolChoice("required", (choice.name,))
    return ToolChoice("required" if choice.type == "any" else "none")


def _guided(body: MessagesBody) -> Guided | None:
    form = body.output_format or (body.output_config.format if body.output_config else None)
    if form is None:
        return None
    field = "output_format" if form is body.output_format else "output_config.format"
    if form.type != "json_schema":
        raise InvalidRequest(f"{field}.type: unknown type '{form.type}'", f"{field}.type")
    if form.schema is None:
        raise missing(f"{field}.schema")
    return Guided(kind="json_schema", value=as_json(form.schema))


def _thinking(thinking: ThinkingBody | None) -> bool | None:
    """True if thinking is enabled; None for the model's default, also for types unknown here."""
    return SWITCHES.get(thinking.type) if thinking is not None else None


def _budget(thinking: ThinkingBody | None) -> int | None:
    """The most tokens of thinking, if it is enabled."""
    if thinking is None or not SWITCHES.get(thinking.type):
        return None
    if thinking.budget_tokens is None:
        raise InvalidRequest("thinking.enabled.budget_tokens: Field required", _BUDGET, MISSING)
    check_range(thinking.budget_tokens, 0, MAX_TOKENS, _BUDGET)
    return thinking.budget_tokens


def _arguments(body: MessagesBody, last: Message) -> dict[str, Any]:
    """The variables of the template."""
    config, arguments = body.output_config, dict[str, Any]()
    if config and config.effort:
        arguments["reasoning_effort"] = config.effort
    if last.role == "assistant" and last.blocks:
        end = last.blocks[-1]
        if isinstance(end, Text) and end.text:
            arguments["continue_final_message"] = True
    return arguments
