"""POST /v1/chat/completions (OpenAI)."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import (
    AnswerSummary,
    ApiCall,
    Ending,
    Headers,
    RequestStamp,
    SoFar,
    TokenLogprob,
    Usage,
    decode,
    json_encode,
)
from kvmesh.frontend.apis.cache_ttl import cache_ttl_s
from kvmesh.frontend.apis.chat.body import ChatBody, to_request, without_effect
from kvmesh.frontend.apis.nvext import annotations_of, ignored_fields
from kvmesh.frontend.apis.request_hints import apply_hints, unknown_headers
from kvmesh.frontend.apis.transcript import PartKind, Transcript
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import (
    GAP,
    AnswerEvent,
    GenerateRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
)
from kvmesh.frontend.errors import ApiError

_OPEN = {"logprobs": None, "finish_reason": None}
_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'
_TEXT_TAIL = b"}" + _TAIL
_CONTENT = b'{"content":'
_decoder = msgspec.json.Decoder(ChatBody)


class Chat:
    name = "chat"
    id_prefix = "chatcmpl-"
    keepalive = openai.KEEPALIVE
    in_order = False

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> ApiCall:
        turn = turn or TurnBody(body)
        parsed = turn.decode(_decoder)
        request = to_request(parsed, self.id_prefix + stamp.token, turn)
        apply_hints(request, headers, parsed.nvext, parsed.prompt_cache_key)
        request.retain_prompt(
            cache_ttl_s(parsed.prompt_cache_retention, parsed.prompt_cache_options)
        )
        if "ignored" in request.extra_fields:
            fields = [
                *ignored_fields(body, ChatBody, True),
                *without_effect(decode(_decoder, body)),
            ]
            request.ignored += [*fields, *unknown_headers(headers)]
        request.annotations = annotations_of(parsed.nvext)
        extras = openai.ChunkExtras(request, parsed.stream_options)
        return ApiCall(request, ChatAnswer(request, stamp.created, extras))


class ChatChoice:
    """The transcript of one choice, and the encoded head of its chunks with text.

    A stream has the number of its `calls` instead, and whether the last is one of a `custom` tool.
    """

    def __init__(self, index: int, common: bytes) -> None:
        self.index = index
        self.text_head = b'data: %b,"choices":[{"index":%d,"delta":%b' % (common, index, _CONTENT)
        self.transcript = Transcript()
        self.logprobs: list[TokenLogprob] = []
        self.calls = 0
        self.custom = False
        self.finish = "stop"
        self.last: type[AnswerEvent] | None = None  # of the deltas
        self._written: tuple[type[AnswerEvent], ...] = ()

    @property
    def head(self) -> bytes:
        """The beginning of a chunk with any delta."""
        return self.text_head.removesuffix(_CONTENT)

    def joined(self, event: TextDelta | ThinkingDelta) -> str:
        """The event's text, after a gap if its field has one from before a call."""
        kind = type(event)
        gap = GAP if kind is not self.last and kind in self._written else ""
        self.last = kind
        if kind not in self._written:
            self._written += (kind,)
        return gap + event.text


class ChatAnswer:
    """Renders chunks and the whole completion."""

    def __init__(self, request: GenerateRequest, created: int, extras: openai.ChunkExtras) -> None:
        self._stream = request.stream
        self._extras = extras
        self._with_logprobs = request.sampling.logprobs is not None
        self._chunk_common = {
            "object": "chat.completion.chunk",
            "id": request.id,
            "created": created,
            "model": request.model,
            **extras.common,
        }
        common = json_encode(self._chunk_common)[:-1]
        self._choices = [ChatChoice(index, common) for index in range(request.n)]

    def begin(self, so_far: SoFar | None = None) -> bytes:
        self._extras.begin(so_far)
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(choice, first) for choice in self._choices)

    def started(self, usage: Callable[[], Usage]) -> bytes:
        return b""

    def events(self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        state = self._choices[choice]
        if not self._stream:
            state.logprobs += logprobs
            for event in events:
                state.transcript.add(event)
            return b""
        if logprobs:
            return self._with_tokens(choice, events, logprobs)
        plain = not self._extras.pending
        if plain and len(events) == 1 and type(events[0]) is TextDelta is state.last:
            return state.text_head + json_encode(events[0].text) + _TEXT_TAIL
        return b"".join([self._chunk(state, _delta(state, event)) for event in events])

    def _with_tokens(
        self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]
    ) -> bytes:
        """Chunks of the deltas; the first carries the log-probabilities of all tokens."""
        state = self._choices[choice]
        deltas = [delta for event in events if (delta := _delta(state, event))] or [{}]
        frames = []
        for delta in deltas:
            content = {"content": logprobs, "refusal": None} if logprobs else None
            entry = {"index": choice, "delta": delta, "logprobs": content, "finish_reason": None}
            chunk = {**self._chunk_common, "choices": [entry], **self._extras.next()}
            frames.append(openai.event(chunk))
            logprobs = []
        return b"".join(frames)

    def end(self, choice: int, ending: Ending) -> bytes:
        state = self._choices[choice]
        called = state.calls or state.transcript.calls
        state.finish = "tool_calls" if ending.reason == "stop" and called else ending.reason
        if not self._stream:
            return b""
        last = {"index": choice, "delta": {}, "logprobs": None, "finish_reason": state.finish}
        return self._extras.ended({**self._chunk_common, "choices": [last]})

    def done(self, summary: AnswerSummary) -> bytes:
        return self._extras.ending(summary, self._chunk_common)

    def failed(self, error: ApiError) -> bytes:
        return openai.event(openai.error_object(error)) + openai.DONE

    def whole(self, summary: AnswerSummary) -> bytes:
        choices = [
            {
                "index": index,
                "message": _message(choice.transcript),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        usage = openai.usage_object(summary.usage)
        extra = {"nvext": summary.nvext} if summary.nvext is not None else {}
        head = {**self._chunk_common, "object": "chat.completion"}
        return json_encode({**head, "choices": choices, "usage": usage, **extra})

    def _logprobs(self, choice: ChatChoice) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": choice.logprobs, "refusal": None}

    def _chunk(self, choice: ChatChoice, delta: dict[str, Any]) -> bytes:
        if not delta:
            return b""
        if self._extras.pending:
            entry = {"index": choice.index, "delta": delta, **_OPEN}
            return openai.event({**self._chunk_common, "choices": [entry], **self._extras.next()})
        return choice.head + json_encode(delta) + _TAIL


def _delta(choice: ChatChoice, event: AnswerEvent) -> dict[str, Any]:
    if isinstance(event, TextDelta):
        return {"content": choice.joined(event)}
    if isinstance(event, ThinkingDelta):
        return {"reasoning_content": choice.joined(event)}
    choice.last = None
    if isinstance(event, ToolCallStart):
        choice.calls += 1
        choice.custom = event.custom
        return {"tool_calls": [{"index": choice.calls - 1, **_call(event, "")}]}
    if isinstance(event, ToolCallDelta):
        text = event.arguments
        added = {"custom": {"input": text}} if choice.custom else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": choice.calls - 1, **added}]}
    return {}


def _message(transcript: Transcript) -> dict[str, Any]:
    calls = [_call(part.start, part.text) for part in transcript.calls if part.start is not None]
    thinking = transcript.joined(PartKind.THINKING)
    content = transcript.joined(PartKind.TEXT) or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _call(start: ToolCallStart, arguments: str) -> dict[str, Any]:
    if start.custom:
        custom = {"name": start.name, "input": arguments}
        return {"id": start.id, "type": "custom", "custom": custom}
    function = {"name": start.name, "arguments": arguments}
    return {"id": start.id, "type": "function", "function": function}
