"""One choice of an answer, which renders the tokens of one sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvmesh.frontend.apis.base import Ending, Renderer, TokenLogprob
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.conversation import AnswerEvent
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.awaited import AnswerCalls
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.tokenizer.detokenizer import TokenTexts


class FrameSink(Protocol):
    """The client's end of an answer."""

    @property
    def writable(self) -> bool:
        """True while the response is open and its reader keeps up."""
        ...

    def write(self, frame: bytes) -> None:
        """Send a frame without waiting."""
        ...


class DiscardSink:
    """The sink of an answer that is sent as a whole; the renderer collects its events."""

    @property
    def writable(self) -> bool:
        return True

    def write(self, frame: bytes) -> None:
        return


@dataclass(frozen=True)
class AnswerContext:
    """Shared by the choices of an answer.

    `on_prefilled` is called at the first tokens of each attempt; `opening` returns the frame before
    the first events of the answer, and b"" after that. `texts` is set if log-probabilities are
    requested; `transcript`, if set, collects all events.
    """

    renderer: Renderer
    sink: FrameSink
    on_prefilled: Callable[[TokenStream], None]
    opening: Callable[[], bytes]
    texts: TokenTexts | None = None
    transcript: Transcript | None = None


class Choice:
    """Renders new tokens of `stream` into the answer's sink at each `flush`.

    `calls` are the tool calls of the answer so far; `finished`: all of it is rendered.
    """

    def __init__(
        self, index: int, stream: TokenStream, pipeline: OutputPipeline, answer: AnswerContext
    ) -> None:
        self._index = index
        self._stream = stream
        self._pipeline = pipeline
        self._renderer = answer.renderer
        self._sink = answer.sink
        self._on_prefilled = answer.on_prefilled
        self._opening = answer.opening
        self._texts = answer.texts
        self._transcript = answer.transcript
        self._prefilled = ""
        self._opened = False
        self._rendered = 0
        self.calls = AnswerCalls()
        self.finished = False

    def flush(self) -> None:
        """Render tokens that have arrived, if the reader keeps up."""
        stream = self._stream
        if self._prefilled != stream.attempt and stream.fresh:
            self._prefilled = stream.attempt
            self._on_prefilled(stream)
        if self._sink.writable:
            frame = self._render_tokens()
            if frame:
                self._sink.write(frame)

    def finish(self) -> bytes:
        """Return the last frames, whether or not the reader keeps up."""
        self.finished = True
        frame = self._render_tokens()
        events = self._pipeline.finish()
        if events:
            frame += self._render(events, [])
        stopped_by = self._pipeline.stopped_by
        reason = "stop" if stopped_by is not None else self._stream.finish or "stop"
        return frame + self._renderer.end(self._index, Ending(reason, stopped_by))

    def _render_tokens(self) -> bytes:
        stream, pipeline, start = self._stream, self._pipeline, self._rendered
        ids = stream.tokens[start:]
        if not ids or pipeline.complete:
            return b""
        self._rendered = start + len(ids)
        events = pipeline.feed(ids)
        if pipeline.complete or pipeline.stopped_by is not None:
            stream.stop("stop")
        logprobs = self._logprobs(start) if self._texts is not None else []
        if not events and not logprobs:
            return b""
        return self._render(events, logprobs)

    def _render(self, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        if self._transcript is not None:
            for event in events:
                self._transcript.add(event)
        for event in events:
            self.calls.add(event)
        frame = self._renderer.events(self._index, events, logprobs)
        if self._opened:
            return frame
        self._opened = True
        return self._opening() + frame

    def _logprobs(self, start: int) -> list[TokenLogprob]:
        texts, stream = self._texts, self._stream
        if texts is None:
            return []
        tokens = zip(stream.tokens[start:], stream.logprobs[start:], strict=False)
        return [_token(token, known, texts) for token, known in tokens]


def _token(token: int, known: dict[int, float], texts: TokenTexts) -> TokenLogprob:
    ranked = sorted(known.items(), key=lambda item: -item[1])
    top = [_entry(other, value, texts) for other, value in ranked]
    own = _entry(token, known.get(token, -9999.0), texts)
    return TokenLogprob(own.token, own.logprob, own.bytes, top)


def _entry(token: int, logprob: float, texts: TokenTexts) -> TokenLogprob:
    raw = texts.token_bytes(token)
    return TokenLogprob(raw.decode(errors="replace"), logprob, list(raw))
