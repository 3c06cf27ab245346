"""The requests in one record with texts or messages."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.workload.model import HUMAN, TOOL
from kvmesh.workload.reading.options import TimeUnit
from kvmesh.workload.reading.rows import name_of

ANSWERS = ("assistant", "gpt", "ai", "model", "bot", "chatgpt", "bing", "bard")
TOOLS = ("tool", "function", "observation", "ipython", "environment")
CONVERSATIONS = ("conversations", "conversation", "history", "messages", "trajectory")
PROMPTS = (
    *("text_input", "text", "prompt", "prompt_token_ids", "question", "instruction", "input"),
    *("query", "content"),
)
TEXTS = (
    ("reasoning_content", "reasoning", "thinking", "summary"),
    ("content", "value", "text", "output"),
)
CALLS = ("tool_calls", "function_call", "input", "arguments")
OUTPUTS = ("output", "response", "completion", "answer")
OUTPUT_TOKENS = (
    "output_length",
    "output_tokens",
    "output_tokens_count",
    "completion_tokens_count",
    "completion_tokens",
    "expected_output_len",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
)


class TextRequest(Struct, kw_only=True):
    """A request as text.

    `time` is in `unit`, or a date; `delay`, after the turn before, in `delay_unit`. With `grows`,
    the prompt is what a turn adds to the conversation; with `adds`, the format leaves open which of
    both it is.
    """

    prompt: bytes
    session: str | None = None
    output: bytes | None = None
    output_tokens: int | None = None
    time: float | str | None = None
    unit: TimeUnit = "ms"
    delay: float | None = None
    delay_unit: TimeUnit = "ms"
    grows: bool = False
    adds: bool = False
    wait: str = ""


def is_text(fields: Mapping[str, Any]) -> bool:
    """True if a record holds a prompt, messages or turns."""
    fields = _request_body(fields)
    names = ("turns", "texts", *CONVERSATIONS, *PROMPTS)
    return any(isinstance(fields.get(name), str | list) for name in names)


def requests_of(record: Mapping[str, Any], name: str) -> Iterator[TextRequest]:
    """The requests of a record; `name` names its session if the record does not."""
    body = _request_body(record)
    fields = {key: value for key, value in body.items() if value not in (None, "")}
    if isinstance(fields.get("turns"), list):
        return _turns(fields, name)
    conversation = next((fields[key] for key in CONVERSATIONS if _is_list(fields, key)), None)
    if conversation is not None and not _is_one_request(fields, conversation):
        return _answers(fields, _steps(conversation), _session(fields) or name)
    return iter([_single(fields, conversation)])


def _request_body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a recorded HTTP request with the fields beside it (OpenAI's batches, AIPerf)."""
    for key in ("body", "payload"):
        if isinstance(record.get(key), dict):
            return {**record, **record[key]}
    return record


def _is_list(fields: Mapping[str, Any], key: str) -> bool:
    return isinstance(fields.get(key), list) and bool(fields[key])


def _is_one_request(fields: Mapping[str, Any], conversation: list[Any]) -> bool:
    """True if all messages are the prompt: their answer or its length stands beside them."""
    if _output_tokens(fields) is not None or isinstance(fields.get("output"), str):
        return True
    return _role(_steps(conversation)[-1]) not in ANSWERS


def _single(fields: Mapping[str, Any], conversation: list[Any] | None) -> TextRequest:
    output = next((fields[key] for key in OUTPUTS if isinstance(fields.get(key), str)), None)
    time, unit = _time(fields)
    key = "delay" if fields.get("delay") is not None else "pre_gap"
    delay = fields.get(key)
    return TextRequest(
        prompt=_prompt(fields, conversation),
        session=_session(fields),
        output=None if output is None else output.encode(),
        output_tokens=_output_tokens(fields),
        time=time,
        unit=unit,
        delay=None if delay is None else float(delay),
        delay_unit="ms" if key == "delay" else "s",
        adds="text_input" in fields,
    )


def _prompt(fields: Mapping[str, Any], conversation: list[Any] | None) -> bytes:
    head = _head(fields)
    if conversation is not None:
        return head + b"".join(map(_rendered, _steps(conversation)))
    if _is_list(fields, "texts"):
        return head + "\n".join(map(str, fields["texts"])).encode()
    for key in PROMPTS:
        value = fields.get(key)
        if isinstance(value, str):
            # Alpaca's instructions have their text beside them.
            about = fields.get("input") if key == "instruction" else ""
            return head + value.encode() + _text(about)
        if isinstance(value, list) and all(type(each) is int for each in value):
            try:
                return head + array("I", value).tobytes()  # token ids, of TOKEN_BYTES each
            except OverflowError as error:
                raise msgspec.ValidationError(f"a token id is out of range - at `{key}`") from error
        if isinstance(value, list) and value:
            return head + b"".join(_rendered(each) for each in value)
    raise msgspec.ValidationError("no text, messages or answer in this record")


def _head(fields: Mapping[str, Any]) -> bytes:
    """The tools and instructions before all messages, which have a field of their own."""
    tools = fields.get("tools") or b""
    names = ("system_prompt", "system", "instructions")
    system = next((fields[name] for name in names if fields.get(name)), "")
    return (msgspec.json.encode(tools) if isinstance(tools, list) else _text(tools)) + _text(system)


def _time(fields: Mapping[str, Any]) -> tuple[float | str | None, TimeUnit]:
    if fields.get("session_timestamp") is not None:
        return fields["session_timestamp"], "s"
    if fields.get("timestamp") is not None:
        recorded = "input" in fields and "session_id" in fields
        return fields["timestamp"], "s" if recorded else "ms"
    return fields.get("relative_timestamp"), "s"


def _session(fields: Mapping[str, Any]) -> str | None:
    for key in ("session_id", "conversation_id", "instance_id", "traj_id", "id"):
        if fields.get(key) is not None:
            return str(name_of(fields[key]))
    return None


def _output_tokens(fields: Mapping[str, Any]) -> int | None:
    for key in OUTPUT_TOKENS:
        if fields.get(key) is not None:
            return int(float(fields[key]))
    return None


def _turns(fields: Mapping[str, Any], name: str) -> Iterator[TextRequest]:
    """AIPerf's multi-turn conversations: each turn adds its text."""
    session = _session(fields) or name
    for index, turn in enumerate(fields["turns"]):
        each = {"text": turn} if isinstance(turn, str) else _object(turn, "turns")
        one = _single({key: value for key, value in each.items() if value is not None}, None)
        one.session = session
        one.grows = index > 0
        one.wait = HUMAN if index else ""
        one.adds = False
        if index and one.time is None:
            one.delay = one.delay or 0.0
        yield one


def _steps(conversation: list[Any]) -> list[Any]:
    """The messages of a conversation, or of the steps of SWE-agent's trajectory."""
    if not any(isinstance(step, dict) and "observation" in step for step in conversation):
        return conversation
    messages: list[Any] = []
    for step in (_object(each, "steps") for each in conversation):
        said = step.get("response") or f"{step.get('thought', '')}\n{step.get('action', '')}"
        messages += [
            {"role": "assistant", "content": said},
            {"role": "tool", "content": step.get("observation") or ""},
        ]
    return messages


def _answers(fields: Mapping[str, Any], messages: list[Any], session: str) -> Iterator[TextRequest]:
    """A request per answer; its prompt is all that was said before, from the record's time on."""
    prompt = bytearray()
    before = ""
    time, unit = _time(fields)
    for message in messages:
        role = _role(message)
        text = _rendered(message)
        if role in ANSWERS and prompt:
            yield TextRequest(
                prompt=_head(fields) + prompt,
                session=session,
                output=text,
                time=time,
                unit=unit,
                delay=0.0 if time is None else None,
                wait=TOOL if before in TOOLS else HUMAN,
            )
            time = None
        prompt += text
        before = role


def _role(message: Any) -> str:
    if not isinstance(message, dict):
        return "user"
    return str(message.get("role") or message.get("from") or message.get("user") or "user").lower()


def _rendered(message: Any) -> bytes:
    """The text of a message behind the name of its author."""
    if isinstance(message, str):
        return message.encode() + b"\n"
    return b"%b\n%b\n" % (_role(message).encode(), _text(_object(message, "messages")))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise TypeError(f"Expected `object` or `str`, got `{kind}` - in {where}")
    return value


def _text(part: Any) -> bytes:
    """The text of a message or of a part of it; images and the like have none."""
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, list):
        return b"".join(map(_text, part))
    if not isinstance(part, dict):
        return b""
    found = [_text(next((part[key] for key in keys if part.get(key)), "")) for keys in TEXTS]
    calls = next((part[key] for key in CALLS if part.get(key)), "")
    return b"".join(found) + (
        _text(calls) if isinstance(calls, str) else msgspec.json.encode(calls)
    )
