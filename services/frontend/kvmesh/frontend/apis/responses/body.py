"""Body of a Responses request, and its translation into the internal form."""

from collections.abc import Callable
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.frontend.apis.base import (
    as_json,
    check_length,
    check_range,
    decode,
    decode_part,
    missing,
)
from kvmesh.frontend.apis.body_types import defined_as, unknown_fields
from kvmesh.frontend.apis.cache_ttl import (
    CacheOptions,
    CacheRetention,
    inner_cache_control,
)
from kvmesh.frontend.apis.chat.body import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
)
from kvmesh.frontend.apis.content.compaction import opened_summary
from kvmesh.frontend.apis.content.constraints import StructuredOutputsBody, named, only, structured
from kvmesh.frontend.apis.content.parts import Content, answer_blocks, content_blocks
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.apis.content.tagged import Foreign, Reading
from kvmesh.frontend.apis.faults import MISSING
from kvmesh.frontend.apis.nvext import Nvext
from kvmesh.frontend.apis.openai import Metadata
from kvmesh.frontend.apis.responses.hosted_items import hosted_messages
from kvmesh.frontend.apis.responses.references import ItemHead
from kvmesh.frontend.apis.responses.tool_bodies import (
    ResponsesToolBody,
    ResponsesToolChoice,
    definitions,
    tool_choice,
)
from kvmesh.frontend.apis.sampling import MAX_TOKENS, Effort
from kvmesh.frontend.apis.sealed_reasoning import SealedTooLong
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import (
    Compact,
    ContextEdits,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest

KNOWN = frozenset(
    (
        *("message", "reasoning", "item_reference", "compaction", "compaction_trigger"),
        *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    )
)
COMPACTION, TRIGGER = "compaction", "compaction_trigger"
T = TypeVar("T")
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the others have no effect
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class Item(ItemHead, omit_defaults=True):
    """Input item of a known type; `type`, optional in messages, selects the fields in use."""

    status: str | None = None
    content: Content | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: Content | dict[str, Any] | None = None
    summary: Content | None = None
    encrypted_content: str | None = None


class TextFormat(Struct):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextBody(Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(Struct):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ContextManagementEntry(Struct):
    """Entries of other types than COMPACTION have no effect."""

    type: str
    compact_threshold: Annotated[int, Meta(ge=1)] | None = None


class ConversationParam(Struct):
    id: str


class ResponsesBody(Struct, kw_only=True):
    """Fields of the Responses API. Ignores unknown fields."""

    model: str
    input: str | list[Raw] | None = None
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
    include: list[Included] | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    metadata: Metadata | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: CacheOptions | None = None
    background: bool | None = None
    generate: bool | None = None
    context_management: list[ContextManagementEntry] | None = None
    conversation: str | ConversationParam | None = None
    prompt: Any = None
    response_format: Any = None
    structured_outputs: StructuredOutputsBody | None = None
    stop: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    functions: Any = None
    reasoning_effort: Any = None
    nvext: Nvext | None = None


UNSUPPORTED = UnsupportedFields(
    prompt="instructions",
    response_format="text.format",
    stop=None,
    max_tokens="max_output_tokens",
    max_completion_tokens="max_output_tokens",
    functions="tools",
    reasoning_effort="reasoning.effort",
)
_item = msgspec.json.Decoder(Item)


def to_request(body: ResponsesBody, request_id: str, turn: TurnBody) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field.

    `body` lacks the items that `turn` knows.
    """
    _check(body, turn.count)
    reasoning = body.reasoning or ReasoningBody()
    reading = Reading()
    new = [_shown(raw, index, reading) for index, raw in enumerate(input_items(body), turn.count)]
    messages = turn.make(new, reading) if isinstance(body.input, list) else [*chain(*new)]
    system = [turn.memo.same("instructions", message) for message in instructions(body)]
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=_sampling(body),
        messages=[*system, *messages],
        tools=definitions.tools(body.tools or [], reading.skipped),
        tool_choice=tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        guided=_guided(body),
        template_args={"reasoning_effort": reasoning.effort} if reasoning.effort else {},
        thinking=False if reasoning.effort == "none" else None,
        stream=bool(body.stream),
        context_edits=_edits(body, reading),
        body_bytes=reading.sealed.bytes,
        content_field="input",
        ignored=reading.skipped,
    )


def _check(body: ResponsesBody, known: int) -> None:
    UNSUPPORTED.refuse(body)
    if body.conversation is not None and body.previous_response_id is not None:
        reason = "`previous_response_id` cannot be used with `conversation`."
        raise InvalidRequest(reason, "previous_response_id", "mutually_exclusive_parameters")
    continues = body.previous_response_id or body.conversation
    if not (body.input or continues or preloads(body)):
        raise InvalidRequest("`input` must not be empty.", "input", MISSING)
    if isinstance(body.input, list):
        check_length(known + len(body.input), 0, MAX_MESSAGES, "input")
    check_length(len(body.tools or []), 0, MAX_TOOLS, "tools")
    if body.background and preloads(body):
        raise InvalidRequest("`background` has no effect without an answer.", "background")
    if body.background and body.store is False:
        raise InvalidRequest("`background` requires `store`.", "background")


def _edits(body: ResponsesBody, reading: Reading) -> ContextEdits | None:
    """The compaction that the body asks for, by a threshold or at once."""
    entry = next((e for e in body.context_management or () if e.type == COMPACTION), None)
    if entry is None and not reading.trigger:
        return None
    if body.background:
        param = reading.trigger or "context_management"
        raise InvalidRequest(f"`{param}`: not supported with `background`.", param)
    tokens = entry.compact_threshold if entry is not None else None
    asked = bool(reading.trigger)
    return ContextEdits(compact=Compact(tokens, pauses=asked, always=asked))


def _sampling(body: ResponsesBody) -> Sampling:
    check_range(body.max_output_tokens, 1, MAX_TOKENS, "max_output_tokens")
    check_range(body.temperature, 0, 2, "temperature")
    check_range(body.top_p, 0, 1, "top_p")
    check_range(body.top_logprobs, 0, MAX_LOGPROBS, "top_logprobs")
    wanted = body.top_logprobs or LOGPROBS in (body.include or [])
    return Sampling(
        max_tokens=body.max_output_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        logprobs=(body.top_logprobs or 0) if wanted else None,
    )


def without_effect(body: ResponsesBody) -> list[str]:
    """Paths of the known fields whose values have no effect."""
    found = ["truncation"] if body.truncation == "auto" else []
    found += [f"include[{i}]" for i, name in enumerate(body.include or ()) if name not in INCLUDED]
    entries = enumerate(body.context_management or ())
    found += [f"context_management[{i}]" for i, e in entries if e.type != COMPACTION]
    if body.text is not None and body.text.verbosity is not None:
        found.append("text.verbosity")
    if body.reasoning is not None and body.reasoning.summary is not None:
        found.append("reasoning.summary")
    for index, raw in enumerate(input_items(body)):
        if isinstance(_decode(raw, "input"), Item):
            fields = unknown_fields(decode_part(raw, f"input[{index}]"), Item)
            found += [f"input[{index}].{field}" for field in fields]
    return found


def input_items(body: ResponsesBody) -> list[Raw]:
    """The input as items; a string is one user message."""
    if isinstance(body.input, str):
        return [Raw(msgspec.json.encode({"role": "user", "content": body.input}))]
    return list(body.input or ())


def to_messages(items: list[Raw], reading: Reading) -> list[Message]:
    """The messages of items, without ids and metadata; none for a reference, yet to be resolved."""
    return [*chain(*(_shown(raw, index, reading) for index, raw in enumerate(items)))]


def _shown(raw: Raw, index: int, reading: Reading) -> list[Message]:
    """The messages of the item at this index that are not empty."""
    return [m for m in _messages(raw, f"input[{index}]", reading) if m.blocks]


def storable_items(items: list[Raw], field: str = "input") -> list[Raw]:
    """The items to store: references and what a prompt can hold, without unknown fields.

    `field` of the body holds them. Raises InvalidRequest.
    """
    reading, found = Reading(), []
    for index, raw in enumerate(items):
        where = f"{field}[{index}]"
        item = _decode(raw, where)
        if not isinstance(item, Item):
            found += [raw] if hosted_messages(item) else []
        elif item.is_reference or _message(item, where, reading) is not None:
            found.append(Raw(msgspec.json.encode(item)))
    return found


def _decode(raw: Raw, where: str) -> Item | Foreign:
    """The item; one of an unknown type as it is."""
    try:
        item = _item.decode(raw)
        if item.type is None or item.type in KNOWN or item.is_reference:
            return item
    except msgspec.ValidationError:
        pass
    value = decode_part(raw, where)
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in KNOWN:
        return value
    return decode(_item, bytes(raw), where)


def _messages(raw: Raw, where: str, reading: Reading) -> list[Message]:
    item = _decode(raw, where)
    if reading.trigger:
        reason = f"`{reading.trigger}`: only the last item may be a compaction trigger."
        raise InvalidRequest(reason, reading.trigger)
    if not isinstance(item, Item):
        messages = hosted_messages(item)
        if not messages:
            reading.skipped.append(where)
        return messages
    if item.type == TRIGGER:
        reading.trigger = where
        return []
    message = _message(item, where, reading)
    if message is None and not item.is_reference:
        reading.skipped.append(where)
    reading.refers |= message is None
    return [] if message is None else [message]


def preloads(body: ResponsesBody) -> bool:
    """True if the prompt is to be computed ahead, without an answer."""
    options = body.prompt_cache_options
    return body.generate is False or bool(options and options.prewarm)


def summarizes(body: ResponsesBody) -> bool:
    """True if thinking is to be the summary of reasoning items, and not their content."""
    return body.reasoning is not None and body.reasoning.summary not in (None, "none")


def instructions(body: ResponsesBody) -> list[Message]:
    return [Message("system", [Text(body.instructions)])] if body.instructions else []


def _message(item: Item, where: str, reading: Reading) -> Message | None:
    """The internal message; None for a reference, and for opaque content that cannot be read."""
    kind = item.type or ("message" if item.role else None)
    if kind == "message":
        if item.role not in ROLES:
            raise InvalidRequest(f"`{where}.role`: unknown role {item.role!r}.", f"{where}.role")
        if item.content is None:
            raise missing(f"{where}.content")
        role = ROLES[item.role]
        blocks_of = answer_blocks if role == "assistant" else content_blocks
        return Message(role, [*blocks_of(item.content, f"{where}.content", reading)])
    if kind == "function_call" or kind == "custom_tool_call":
        return Message("assistant", [_call(item, where)])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", [_result(item, where, reading)])
    if kind == "reasoning":
        thinking = _thinking(item, where, reading)
        return Message("assistant", [Thinking(thinking)]) if thinking else None
    if kind == COMPACTION:
        summary = _opened(lambda: opened_summary(item.encrypted_content, reading.sealed), where)
        return Message("assistant", [summary]) if summary is not None else None
    if kind == TRIGGER:
        return None
    if item.is_reference:
        if not item.id:
            raise missing(f"{where}.id")
        return None
    raise missing(f"{where}.type")


def _call(item: Item, where: str) -> ToolCall:
    if not item.name:
        raise missing(f"{where}.name")
    if item.type == "custom_tool_call":
        return ToolCall(item.call_id or "", item.name, item.input or "", item.namespace, True)
    given = item.arguments
    text = given if isinstance(given, str) else as_json(given or {})
    return ToolCall(item.call_id or "", item.name, text, item.namespace)


def _result(item: Item, where: str, reading: Reading) -> ToolResult:
    call = item.call_id or item.name
    if not call:
        raise missing(f"{where}.call_id")
    output = item.output
    if output is None:
        raise missing(f"{where}.output")
    if isinstance(output, dict):
        output = as_json(output)
    content = content_blocks(output, f"{where}.output", reading)
    return ToolResult(call, content, cache=inner_cache_control(content))


def _thinking(item: Item, where: str, reading: Reading) -> str:
    """The full text if the item has it in any form, else the summary."""
    full = "".join(_texts(item.content, f"{where}.content", reading))
    full = full or _opened(lambda: reading.sealed.open(item.encrypted_content), where)
    return full or "\n".join(_texts(item.summary, f"{where}.summary", reading))


def _opened(read: Callable[[], T], where: str) -> T:
    """Read the opaque content of an item."""
    try:
        return read()
    except SealedTooLong:
        reason = f"`{where}.encrypted_content`: too long when decompressed."
        raise InvalidRequest(reason, f"{where}.encrypted_content") from None


def _texts(content: Content | None, where: str, reading: Reading) -> list[str]:
    blocks = content_blocks(content, where, reading)
    return [block.text for block in blocks if isinstance(block, Text)]


def _guided(body: ResponsesBody) -> Guided | None:
    given = structured(body.structured_outputs)
    if body.text is not None and (form := _formatted(body.text)) is not None:
        given.insert(0, ("text.format", form))
    return only(given)


def _formatted(text: TextBody) -> Guided | None:
    form = text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guided(kind="json_object", value="")
    if form.type != "json_schema":
        raise InvalidRequest(f"`text.format.type`: unknown `{form.type}`.", "text.format.type")
    named(form.name or "", "text.format.name")
    if form.schema is None:
        raise missing("text.format.schema")
    return Guided(kind="json_schema", value=as_json(form.schema))
