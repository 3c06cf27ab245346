"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact (OpenAI)."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from kvmesh.frontend.apis import openai, transcript
from kvmesh.frontend.apis.base import (
    AnswerSummary,
    ApiCall,
    CountCall,
    Ending,
    Headers,
    RequestStamp,
    SoFar,
    StoredTurn,
    TokenLogprob,
    Usage,
    decode,
    json_encode,
)
from kvmesh.frontend.apis.cache_ttl import cache_ttl_s
from kvmesh.frontend.apis.content.compaction import leading_system
from kvmesh.frontend.apis.nvext import ignored_fields
from kvmesh.frontend.apis.request_hints import apply_hints, unknown_headers
from kvmesh.frontend.apis.responses.body import (
    ConversationParam,
    ResponsesBody,
    instructions,
    preloads,
    summarizes,
    to_request,
    without_effect,
)
from kvmesh.frontend.apis.responses.input_items import input_item, said_by_user
from kvmesh.frontend.apis.responses.items import RESPONSE_PREFIX, OutputItem, compaction_item
from kvmesh.frontend.apis.responses.thread import ResponsesThread
from kvmesh.frontend.apis.transcript import Transcript, TranscriptPart
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import (
    AnswerEvent,
    Compact,
    ContextEdits,
    ConversationSummary,
    GenerateRequest,
    Text,
)
from kvmesh.frontend.errors import ApiError, ContextExceeded, InvalidRequest, Kind
from kvmesh.hashing import TOKEN_BYTES

CODES: dict[Kind, str] = {
    "invalid_request": "invalid_prompt",
    "rate_limit": "rate_limit_exceeded",
    "overloaded": "server_is_overloaded",
    "unavailable": "server_is_overloaded",
}
_decoder = msgspec.json.Decoder(ResponsesBody)


def parse_body(
    body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody
) -> tuple[ResponsesBody, GenerateRequest]:
    """The body and its request, of a response or of token counting.

    The body lacks the items that `turn` knows.
    """
    parsed = turn.decode(_decoder, "input")
    request = to_request(parsed, Responses.id_prefix + stamp.token, turn)
    apply_hints(request, headers, parsed.nvext, parsed.prompt_cache_key)
    options = parsed.prompt_cache_options
    if options is not None and options.prewarm:
        options = replace(options, prewarm=None)
    request.retain_prompt(cache_ttl_s(parsed.prompt_cache_retention, options))
    if "ignored" in request.extra_fields:
        fields = [*ignored_fields(body, ResponsesBody), *without_effect(decode(_decoder, body))]
        request.ignored += [*fields, *unknown_headers(headers)]
    return parsed, request


MakeThread = Callable[
    [GenerateRequest, ResponsesBody, TurnBody, Callable[[str, object], None]], ResponsesThread
]


class Responses:
    name = "responses"
    id_prefix = RESPONSE_PREFIX
    keepalive = openai.KEEPALIVE
    in_order = True

    def __init__(self, thread: MakeThread = ResponsesThread) -> None:
        self._thread = thread

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> ApiCall:
        turn = turn or TurnBody(body)
        parsed, request = parse_body(body, headers, stamp, turn)
        answer = ResponsesAnswer(request, parsed, stamp)
        thread = self._thread(request, parsed, turn, answer.correct)
        go_on = answer.go_on if parsed.background else None
        return ApiCall(request, answer, thread, go_on, answer.compacted, preload=preloads(parsed))


class Compacting:
    """Summaries of conversations on request; none is stored, as no answer of it is."""

    name = "compact"
    id_prefix = RESPONSE_PREFIX
    keepalive = openai.KEEPALIVE
    in_order = True

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> ApiCall:
        turn = turn or TurnBody(body)
        parsed, request = parse_body(body, headers, stamp, turn)
        if parsed.conversation is not None:
            reason = "`conversation` is not supported here; use `previous_response_id` or `input`."
            raise InvalidRequest(reason, "conversation")
        parsed.store, request.stream = False, False
        request.context_edits = ContextEdits(compact=Compact(pauses=True, always=True))
        thread = ResponsesThread(request, parsed, turn, lambda *_: None)
        answer = CompactedAnswer(request, parsed, stamp, thread)
        return ApiCall(request, answer, thread, compacted=answer.compacted)


class InputTokens:
    """Token counting, exact for the served template."""

    name = "input_tokens"

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> CountCall:
        call = Responses().parse(body, headers, stamp, turn)
        return CountCall(call.request, call.thread)

    def answer(self, request: GenerateRequest, prompts: list[bytes], context: int) -> bytes:
        count = sum(len(prompt) // TOKEN_BYTES for prompt in prompts)
        return json_encode({"object": "response.input_tokens", "input_tokens": count})


class ResponsesAnswer:
    """Renders the event stream and the response object."""

    def __init__(self, request: GenerateRequest, body: ResponsesBody, stamp: RequestStamp) -> None:
        self._transcript = Transcript()
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._sequence = 0
        self._ending = Ending("stop")
        self._id = request.id
        self._token = stamp.token
        self._created = stamp.created
        self._request = request
        self._request_fields = _request_fields(body)
        self._summarized = summarizes(body)
        self._own_system = len(instructions(body))
        self._compaction: list[dict[str, Any]] = []  # the item of a summary
        self._compaction_usage: Usage | None = None  # if that is the whole answer
        self._untold: list[dict[str, Any]] = []  # that item, until its events are sent

    def correct(self, field: str, value: object) -> None:
        """Change a field of the request that the response repeats, from now on."""
        self._request_fields[field] = value

    def go_on(self, number: int) -> None:
        """The next event has this number: a frontend before this one has sent the others."""
        self._sequence = number

    def compacted(self, summary: ConversationSummary, usage: Usage, pauses: bool) -> None:
        """The answer begins with this summary, or with `pauses` is it, with its `usage`."""
        system = leading_system(self._request.messages[self._own_system :])
        texts = tuple(b.text for m in system for b in m.blocks if isinstance(b, Text))
        item = compaction_item(self._token, replace(summary, system=texts))
        self._compaction = self._untold = [item]
        self._compaction_usage = usage if pauses else None

    def begin(self, so_far: SoFar | None = None) -> bytes:
        response = Raw(json_encode(self._object("in_progress", None)))
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def started(self, usage: Callable[[], Usage]) -> bytes:
        return self._summary_events()

    def _summary_events(self) -> bytes:
        """The events of the summary, once."""
        items, self._untold = self._untold, []
        return b"".join(
            self._event(f"response.output_item.{event}", output_index=0, item=item)
            for item in items
            for event in ("added", "done")
        )

    def events(self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        frames = []
        for event in events:
            added = self._transcript.add(event)
            if added is None:
                frames.append(self._close("completed"))
                continue
            part, text = added
            if self._open is None or part is not self._open.part:
                frames += [self._close("completed"), self._start(part)]
            if text:
                frames.append(self._delta(text, logprobs))
                logprobs = []
        return b"".join(frames)

    def _start(self, part: TranscriptPart) -> bytes:
        index = len(self._compaction) + len(self._items)
        item = self._open = OutputItem(index, part, self._token, self._summarized)
        self._items.append(item)
        added, events = item.object(), item.events
        frame = self._event("response.output_item.added", output_index=item.index, item=added)
        if events.part:
            frame += self._event(f"{events.part}.added", **item.position, part=item.content(""))
        return frame

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        item = self._open
        if item is None:
            return b""
        if item.part.kind is transcript.PartKind.TEXT:
            item.logprobs += logprobs
            return self._event(item.events.delta, **item.position, delta=text, logprobs=logprobs)
        return self._event(item.events.delta, **item.position, delta=text)

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        item.status = status
        finish, done = self._finish(item), item.object()
        return finish + self._event("response.output_item.done", output_index=item.index, item=done)

    def _finish(self, item: OutputItem) -> bytes:
        """The events that repeat the text of an item."""
        events, position, text = item.events, item.position, item.part.text
        if item.part.start is not None:
            if item.custom:
                return self._event(events.done, **position, input=text)
            name = item.part.start.name
            return self._event(events.done, **position, name=name, arguments=text)
        is_text = item.part.kind is transcript.PartKind.TEXT
        logprobs = {"logprobs": item.logprobs} if is_text else {}
        done = self._event(events.done, **position, text=text, **logprobs)
        return done + self._event(f"{events.part}.done", **position, part=item.content(text))

    def end(self, choice: int, ending: Ending) -> bytes:
        self._ending = ending
        broken = self._open is not None and self._open.part.broken
        return self._summary_events() + self._close(
            "incomplete" if ending.reason == "length" or broken else "completed"
        )

    def done(self, summary: AnswerSummary) -> bytes:
        body = self.whole(summary)
        return self._event(f"response.{self._status()}", response=Raw(body))

    def _status(self) -> str:
        return "incomplete" if self._ending.reason == "length" else "completed"

    def failed(self, error: ApiError) -> bytes:
        code = error.code if isinstance(error, ContextExceeded) else CODES.get(error.kind)
        fault = {"code": code or "server_error", "message": error.message}
        cut = self._summary_events() + self._close("incomplete")
        response = self._object("failed", None, error=fault, store=False)
        return cut + self._event("response.failed", response=response)

    def whole(self, summary: AnswerSummary) -> bytes:
        return json_encode(self._object(self._status(), summary))

    def _object(self, status: str, summary: AnswerSummary | None, **changes: Any) -> dict[str, Any]:
        incomplete = status == "incomplete"
        usage = None
        if summary is not None:
            usage = _usage_object(self._compaction_usage or summary.usage)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": [*self._compaction, *(item.object() for item in self._items)],
            "usage": usage,
            **self._request_fields,
            **changes,
            **({"nvext": summary.nvext} if summary and summary.nvext is not None else {}),
        }

    def _event(self, event: str, /, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = json_encode({"type": event, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


class CompactedAnswer(ResponsesAnswer):
    """Renders the items that stand for a conversation: what its user said, and a summary."""

    def __init__(
        self,
        request: GenerateRequest,
        body: ResponsesBody,
        stamp: RequestStamp,
        thread: ResponsesThread,
    ) -> None:
        super().__init__(request, body, stamp)
        self._thread = thread

    def whole(self, summary: AnswerSummary) -> bytes:
        said = said_by_user(self._thread.whole)
        turn = StoredTurn(self._id, None, said, [], Raw(b"null"))
        return json_encode(
            {
                "id": self._id,
                "object": "response.compaction",
                "created_at": self._created,
                "output": [*(input_item(turn, n) for n in range(len(said))), *self._compaction],
                "usage": _usage_object(self._compaction_usage or summary.usage),
            }
        )


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.stored,
        },
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def _request_fields(body: ResponsesBody) -> dict[str, Any]:
    """Fields of the request that the response object repeats."""
    text = body.text.format if body.text and body.text.format else None
    form = {"type": "text"} if text is None else text
    conversation = body.conversation
    if isinstance(conversation, str):
        conversation = ConversationParam(conversation)
    return {
        **({} if conversation is None else {"conversation": conversation}),
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_one_line(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _one_line(tool: Raw) -> Raw:
    """The JSON without the line breaks of a client, which would end the line of an event."""
    text = bytes(tool)
    broken = b"\n" in text or b"\r" in text
    return Raw(msgspec.json.format(text, indent=-1)) if broken else tool
