"""One choice of an answer: the consumer of one sequence's tokens."""

from typing import Protocol

from kvmesh.frontend.apis.base import Ending, Renderer, TokenLogprob
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.conversation import AnswerEvent, ThinkingDelta, ToolCallEnd
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.tokenizer.detokenizer import TokenTexts


class Owner(Protocol):
    """The exchange that a choice belongs to, as far as a choice needs it."""

    renderer: Renderer

    def can_send(self) -> bool: ...

    def send(self, frame: bytes) -> None: ...

    def prefilled(self, sequence: TokenStream) -> None:
        """The first tokens of an attempt are there."""
        ...

    def opening(self) -> bytes:
        """What goes before the first events of the whole answer, once."""
        ...


class Choice:
    """Turns tokens into frames when called; counts those that were thinking.

    With `one_call` the answer is over at the end of its first tool call. `said` is to hold it all.
    """

    def __init__(
        self,
        owner: Owner,
        index: int,
        answer: OutputPipeline,
        texts: TokenTexts | None,
        one_call: bool,
        said: Transcript | None = None,
    ) -> None:
        self._said = said
        self._one_call = one_call
        self._over = False
        self._owner = owner
        self._index = index
        self._answer = answer
        self._texts = texts
        self._prefilled = ""
        self._opened = False
        self._thinking = 0.0

    @property
    def reasoning_tokens(self) -> int:
        return round(self._thinking)

    @property
    def stopped_by(self) -> str | None:
        return self._answer.stopped_by

    def ready(self, sequence: TokenStream) -> None:
        if self._prefilled != sequence.attempt and sequence.fresh:
            self._prefilled = sequence.attempt
            self._owner.prefilled(sequence)
        if self._owner.can_send():
            frame = self._take(sequence)
            if frame:
                self._owner.send(frame)

    def finish(self, sequence: TokenStream) -> bytes:
        """The last frames, whether or not the reader keeps up."""
        frame = self._take(sequence)
        events = [] if self._over else self._answer.finish()
        if events:
            frame += self._render(events, [])
        stopped = self._answer.stopped_by
        reason = "stop" if stopped is not None else sequence.finish or "stop"
        return frame + self._owner.renderer.end(self._index, Ending(reason, stopped))

    def _take(self, sequence: TokenStream) -> bytes:
        start = sequence.taken
        ids = sequence.tokens[start:]
        if not ids or self._over:
            return b""
        sequence.taken = start + len(ids)
        events = self._answer.feed(ids)
        if self._one_call:
            events = self._first_call(events)
        if self._over or self._answer.stopped_by is not None:
            sequence.stop()
        logprobs = self._logprobs(sequence, start) if self._texts is not None else []
        if not events and not logprobs:
            return b""
        if type(events[0] if events else None) is ThinkingDelta:
            self._thinking += len(ids) * _share(events)
        return self._render(events, logprobs)

    def _first_call(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Events up to the end of the first call, with which the answer is over."""
        for place, event in enumerate(events):
            if type(event) is ToolCallEnd:
                self._over = True
                return events[: place + 1]
        return events

    def _render(self, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        if self._said is not None:
            for event in events:
                self._said.add(event)
        frame = self._owner.renderer.events(self._index, events, logprobs)
        if self._opened:
            return frame
        self._opened = True
        return self._owner.opening() + frame

    def _logprobs(self, sequence: TokenStream, start: int) -> list[TokenLogprob]:
        texts = self._texts
        if texts is None:
            return []
        tokens = zip(sequence.tokens[start:], sequence.logprobs[start:], strict=False)
        return [_token(token, known, texts) for token, known in tokens]


def _share(events: list[AnswerEvent]) -> float:
    """How much of a batch of events is thinking, by length."""
    thinking = sum(len(e.text) for e in events if isinstance(e, ThinkingDelta))
    others = sum(
        len(getattr(e, "text", "") or getattr(e, "arguments", ""))
        for e in events
        if not isinstance(e, ThinkingDelta)
    )
    return thinking / (thinking + others) if thinking else 0.0


def _token(token: int, known: dict[int, float], texts: TokenTexts) -> TokenLogprob:
    ranked = sorted(known.items(), key=lambda item: -item[1])
    top = [_entry(other, value, texts) for other, value in ranked]
    found = _entry(token, known.get(token, -9999.0), texts)
    return TokenLogprob(found.token, found.logprob, found.bytes, top)


def _entry(token: int, logprob: float, texts: TokenTexts) -> TokenLogprob:
    raw = texts.token_bytes(token)
    return TokenLogprob(raw.decode(errors="replace"), logprob, list(raw))
