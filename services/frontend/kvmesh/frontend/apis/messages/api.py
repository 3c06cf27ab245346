"""POST /v1/messages and /v1/messages/count_tokens (Anthropic)."""

import re
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from kvmesh.frontend.apis import transcript
from kvmesh.frontend.apis.base import (
    AnswerSummary,
    ApiCall,
    CountCall,
    Ending,
    Headers,
    RequestStamp,
    SoFar,
    TokenLogprob,
    Usage,
    json_encode,
)
from kvmesh.frontend.apis.content.compaction import sealed_summary
from kvmesh.frontend.apis.messages.body import SWITCHES, MessagesBody, to_request
from kvmesh.frontend.apis.messages.context_management import unknown_edits
from kvmesh.frontend.apis.nvext import ignored_fields
from kvmesh.frontend.apis.request_hints import apply_hints, session_in_user_id, unknown_headers
from kvmesh.frontend.apis.sealed_reasoning import seal
from kvmesh.frontend.apis.transcript import Transcript, TranscriptPart
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import AnswerEvent, ConversationSummary, GenerateRequest
from kvmesh.frontend.errors import STATUS, ApiError, ContextExceeded, InvalidRequest, Kind
from kvmesh.hashing import TOKEN_BYTES

TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "method_not_allowed": "invalid_request_error",
    "upgrade_refused": "invalid_request_error",
    "too_large": "request_too_large",
    "unsupported_media": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "overloaded_error",
    "unavailable": "api_error",
    "timeout": "timeout_error",
    "internal": "api_error",
}
ACCEPTED = b": accepted\n\n"
TEXT_HEAD = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
DELTAS = {
    transcript.PartKind.TEXT: b'"delta":{"type":"text_delta","text":',
    transcript.PartKind.THINKING: b'"delta":{"type":"thinking_delta","thinking":',
    transcript.PartKind.CALL: b'"delta":{"type":"input_json_delta","partial_json":',
}
_INDEX = re.compile(r"\[(\d+)\]")
_decoder = msgspec.json.Decoder(MessagesBody)


class ThreadsUnsupported(InvalidRequest):
    """The request wants the server to hold the conversation.

    The tool runners of the SDKs then send it whole, if the error has this code in its details.
    """

    def __init__(self) -> None:
        reason = "thread: not supported; send the whole conversation in `messages`"
        super().__init__(reason, "thread", "thread_unsupported_request")


def parse_body(
    body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
) -> tuple[MessagesBody, GenerateRequest]:
    """The body and its request, of a message or of token counting.

    The body lacks the messages that `turn` knows.
    """
    turn = turn or TurnBody(body)
    parsed = turn.decode(_decoder)
    if parsed.thread:
        raise ThreadsUnsupported
    request = to_request(parsed, Messages.id_prefix + stamp.token, turn)
    user = session_in_user_id(parsed.metadata.user_id if parsed.metadata else None)
    apply_hints(request, headers, parsed.nvext, user)
    if parsed.diagnostics is not None:
        request.previous_message = parsed.diagnostics.previous_message_id or ""
    request.retain_prompt(parsed.cache_control.ttl_s() if parsed.cache_control else None)
    if "ignored" in request.extra_fields:
        fields = [*ignored_fields(body, MessagesBody), *_without_effect(parsed)]
        request.ignored += [*fields, *unknown_headers(headers)]
    return parsed, request


def _without_effect(body: MessagesBody) -> list[str]:
    """Paths of the fields whose values have no effect."""
    found, thinking = unknown_edits(body.context_management), body.thinking
    if thinking is not None:
        shown = thinking.display is not None and not omits_thinking(body)
        found += ["thinking.display"] if shown else []
        found += ["thinking.type"] if thinking.type not in SWITCHES else []
        bounds = thinking.budget_tokens is not None and not SWITCHES.get(thinking.type)
        found += ["thinking.budget_tokens"] if bounds else []
    return found


def omits_thinking(body: MessagesBody) -> bool:
    """True if the answer has no texts of thinking; their signatures carry them."""
    return body.thinking is not None and body.thinking.display == "omitted"


class AnthropicErrorShape:
    """Error responses of the Anthropic API."""

    def error(self, error: ApiError, request_id: str) -> tuple[int, bytes]:
        return STATUS[error.kind], json_encode(error_object(error, request_id))


SHAPE = AnthropicErrorShape()


class Messages:
    name = "messages"
    id_prefix = "msg_"
    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'
    in_order = True

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> ApiCall:
        parsed, request = parse_body(body, headers, stamp, turn)
        answer = MessagesAnswer(request, omits_thinking(parsed))
        return ApiCall(request, answer, compacted=answer.compacted)


class CountTokens:
    """Token counting, exact for the served template."""

    name = "count_tokens"

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> CountCall:
        return CountCall(parse_body(body, headers, stamp, turn)[1])

    def answer(self, request: GenerateRequest, prompts: list[bytes], context: int) -> bytes:
        counts: dict[str, Any] = {"input_tokens": sum(map(len, prompts)) // TOKEN_BYTES}
        if request.context_edits is not None:
            original = request.context_edits.original_tokens
            before = counts["input_tokens"] if original is None else original
            counts["context_management"] = {"original_input_tokens": before}
        return json_encode(counts)


def error_object(error: ApiError, request_id: str) -> dict[str, Any]:
    fault: dict[str, Any] = {"type": TYPES[error.kind], "message": _message(error)}
    if isinstance(error, ThreadsUnsupported):
        fault["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": fault, "request_id": request_id}


def _message(error: ApiError) -> str:
    """The message of an error, in which a field's path has dots before its indexes, too.

    Claude Code parses both texts of ContextExceeded, to compact the conversation or lower
    `max_tokens`.
    """
    if not isinstance(error, ContextExceeded):
        path = error.param or ""
        dotted = _INDEX.sub(r".\1", path)
        text = error.message.replace(path, dotted) if path != dotted else error.message
        quoted = f"`{dotted}`:"
        return f"{dotted}:{text.removeprefix(quoted)}" if text.startswith(quoted) else text
    count, wanted, limit = error.prompt_tokens, error.max_tokens, error.context
    if wanted is None:
        stopped = " (it was not counted further)" * error.at_least
        return f"prompt is too long: {count} tokens > {limit} maximum{stopped}"
    return f"input length and `max_tokens` exceed context limit: {count} + {wanted} > {limit}"


def usage_object(usage: Usage) -> dict[str, Any]:
    """`usage`, whose three input counts are disjoint and add up to the prompt."""
    return {
        "input_tokens": usage.prompt - usage.cached - usage.stored,
        "cache_creation_input_tokens": usage.stored,
        "cache_read_input_tokens": usage.cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.stored - usage.stored_1h,
            "ephemeral_1h_input_tokens": usage.stored_1h,
        },
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


class MessagesAnswer:
    """Renders the event stream and the whole message; may omit the texts of thinking."""

    def __init__(self, request: GenerateRequest, omits_thinking: bool = False) -> None:
        self._request = request
        self._omits_thinking = omits_thinking
        self._transcript = Transcript()
        self._open: TranscriptPart | None = None
        self._started = False
        self._called = False
        self._ending = Ending("stop")
        self._summary: ConversationSummary | None = None
        self._iterations: list[Usage] = []
        self._paused = False
        self._ahead = 0  # blocks before those of the transcript

    def compacted(self, summary: ConversationSummary, usage: Usage, pauses: bool) -> None:
        """The answer begins with this summary, whose generation took `usage`.

        With `pauses` it is the whole answer.
        """
        self._summary, self._ahead = summary, 1
        self._iterations, self._paused = [usage], pauses

    def begin(self, so_far: SoFar | None = None) -> bytes:
        """A comment; `message_start` needs the usage, which is known at the first token."""
        return ACCEPTED

    def started(self, usage: Callable[[], Usage]) -> bytes:
        self._started = True
        start = _event({"type": "message_start", "message": self._head(usage())})
        return start + self._compaction()

    def _compaction(self) -> bytes:
        """The events of the block with the summary, if there is one."""
        if self._summary is None:
            return b""
        block = {"type": "compaction", "content": ""}
        delta = {"type": "compaction_delta", **_shown(self._summary)}
        return (
            _event({"type": "content_block_start", "index": 0, "content_block": block})
            + _event({"type": "content_block_delta", "index": 0, "delta": delta})
            + _event({"type": "content_block_stop", "index": 0})
        )

    def _head(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._request.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
            **self._diagnostics(usage),
        }

    def _diagnostics(self, usage: Usage) -> dict[str, Any]:
        asked = self._request.previous_message is not None
        return {"diagnostics": usage.diagnostics} if asked else {}

    def events(self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        frames = []
        for event in events:
            added = self._transcript.add(event)
            if added is None:
                frames.append(self._close())
                continue
            part, text = added
            if part is not self._open:
                frames += [self._close(), self._start(part)]
            if text and not self._omits(part):
                frames.append(self._delta(part, text))
        return b"".join(frames)

    def _omits(self, part: TranscriptPart) -> bool:
        return self._omits_thinking and part.kind is transcript.PartKind.THINKING

    def _signature(self, part: TranscriptPart) -> str:
        """The signature of a thinking block, which carries an omitted text."""
        return seal(part.text) if self._omits(part) else signature(part.text)

    def _start(self, part: TranscriptPart) -> bytes:
        self._open = part
        index = len(self._transcript.parts) - 1 + self._ahead
        block = _empty_block(part)
        return _event({"type": "content_block_start", "index": index, "content_block": block})

    def _delta(self, part: TranscriptPart, text: str) -> bytes:
        head = TEXT_HEAD % (len(self._transcript.parts) - 1 + self._ahead)
        return head + DELTAS[part.kind] + json_encode(text) + b"}}\n\n"

    def _close(self) -> bytes:
        part, self._open = self._open, None
        if part is None:
            return b""
        index = self._transcript.parts.index(part) + self._ahead
        frames = b""
        if part.kind is transcript.PartKind.THINKING:
            delta = {"type": "signature_delta", "signature": self._signature(part)}
            frames = _event({"type": "content_block_delta", "index": index, "delta": delta})
        return frames + _event({"type": "content_block_stop", "index": index})

    def end(self, choice: int, ending: Ending) -> bytes:
        self._ending = ending
        broken = self._open if self._open is not None and self._open.broken else None
        self._called = any(part is not broken for part in self._transcript.calls)
        return self._close()

    def done(self, summary: AnswerSummary) -> bytes:
        start = b"" if self._started else self.started(lambda: summary.usage)
        delta = {"stop_reason": self._reason(), "stop_sequence": self._ending.stop}
        usage = self._usage(summary.usage)
        last = {"type": "message_delta", "delta": delta, "usage": usage, **self._extra(summary)}
        return start + _event(last) + _event({"type": "message_stop"})

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The usage of the answer; with a summary also that of each generation, in order."""
        found = usage_object(usage)
        if not self._iterations:
            return found
        made = [{"type": "compaction", **usage_object(each)} for each in self._iterations]
        own = [] if self._paused else [{"type": "message", **found}]
        return {**found, "iterations": [*made, *own]}

    def _reason(self) -> str:
        if self._paused:
            return "compaction"
        if self._ending.stop is not None:
            return "stop_sequence"
        if self._ending.reason == "length":
            return "max_tokens"
        return "tool_use" if self._called else "end_turn"

    def failed(self, error: ApiError) -> bytes:
        return _event(error_object(error, self._request.id))

    def whole(self, summary: AnswerSummary) -> bytes:
        return json_encode(
            {
                **self._head(summary.usage),
                "content": [*self._summaries(), *map(self._whole_block, self._transcript.parts)],
                "usage": self._usage(summary.usage),
                "stop_reason": self._reason(),
                "stop_sequence": self._ending.stop,
                **self._extra(summary),
            }
        )

    def _summaries(self) -> list[dict[str, Any]]:
        summary = self._summary
        return [] if summary is None else [{"type": "compaction", **_shown(summary)}]

    def _whole_block(self, part: TranscriptPart) -> dict[str, Any]:
        text = part.text
        if part.start is not None:
            return {**_empty_block(part), "input": _arguments(text)}
        if part.kind is transcript.PartKind.THINKING:
            shown = "" if self._omits_thinking else text
            return {"type": "thinking", "thinking": shown, "signature": self._signature(part)}
        return {"type": "text", "text": text}

    def _extra(self, summary: AnswerSummary) -> dict[str, Any]:
        edits = self._request.context_edits
        extra: dict[str, Any] = {}
        if edits is not None:
            extra["context_management"] = {"applied_edits": edits.applied}
        return {**extra, "nvext": summary.nvext} if summary.nvext is not None else extra


def _shown(summary: ConversationSummary) -> dict[str, Any]:
    return {"content": summary.text, "encrypted_content": sealed_summary(summary)}


def signature(thinking: str) -> str:
    """Opaque signature of a thinking block."""
    return blake2b(thinking.encode(), digest_size=24).hexdigest()


def _empty_block(part: TranscriptPart) -> dict[str, Any]:
    if part.start is not None:
        return {"type": "tool_use", "id": part.start.id, "name": part.start.name, "input": {}}
    if part.kind is transcript.PartKind.THINKING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; empty for a truncated call."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _event(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), json_encode(value))
