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
from kvmesh.frontend.generation.text_logprobs import TextLogprobs
from kvmesh.frontend.generation.thinking_budget import ThinkingBudget


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
    the first events of the answer, and b"" after that. `transcript`, if set, collects all events.
    """

    renderer: Renderer
    sink: FrameSink
    on_prefilled: Callable[[TokenStream], None]
    opening: Callable[[], bytes]
    transcript: Transcript | None = None


class Choice:
    """Renders new tokens of `stream` into the answer's sink at each `flush`.

    `calls` are the tool calls of the answer so far; `finished`: all of it is rendered. `logprobs`,
    the parser of `pipeline`, is set if log-probabilities are requested. While the thinking may
    exceed its `budget`, tokens are rendered whether or not the reader keeps up.
    """

    def __init__(
        self,
        index: int,
        stream: TokenStream,
        pipeline: OutputPipeline,
        answer: AnswerContext,
        logprobs: TextLogprobs | None = None,
        budget: ThinkingBudget | None = None,
    ) -> None:
        self._budget = budget
        self._held = b""  # frames for a reader that does not keep up
        self._index = index
        self._stream = stream
        self._pipeline = pipeline
        self._renderer = answer.renderer
        self._sink = answer.sink
        self._on_prefilled = answer.on_prefilled
        self._opening = answer.opening
        self._logprobs = logprobs
        self._transcript = answer.transcript
        self._prefilled = ""
        self._opened = False
        self._rendered = 0
        self.calls = AnswerCalls()
        self.finished = False

    @property
    def rendered(self) -> int:
        """Tokens that are rendered."""
        return self._rendered

    def flush(self) -> None:
        """Render tokens that have arrived, if the reader keeps up."""
        stream = self._stream
        if self._prefilled != stream.attempt and stream.fresh:
            self._prefilled = stream.attempt
            self._on_prefilled(stream)
        if self._sink.writable:
            frame = self._held + self._render_tokens()
            self._held = b""
            if frame:
                self._sink.write(frame)
        elif self._budget is not None:
            self._held += self._render_tokens()

    def finish(self) -> bytes:
        """Return the last frames, whether or not the reader keeps up."""
        self.finished = True
        frame = self._held + self._render_tokens()
        events = self._pipeline.finish()
        if self._logprobs is not None:
            settled = [*self._logprobs.settle(events), *self._logprobs.flush()]
            frame += b"".join([self._render([event], found) for event, found in settled])
        elif events:
            frame += self._render(events, [])
        reason = "stop" if self._pipeline.complete else self._stream.finish or "stop"
        ending = Ending(reason, self._pipeline.stopped_by)
        return frame + self._renderer.end(self._index, ending)

    def _render_tokens(self) -> bytes:
        budget, frames = self._budget, b""
        while budget is not None and self._rendered < len(self._stream.tokens):
            before, room = self._rendered, budget.room(self._pipeline)
            frames += self._render_next(room) if room else b""
            following = self._stream.tokens[self._rendered :]
            if budget.exceeded(self._pipeline, self._rendered - before, following):
                self._stream.redirect(self._rendered, budget.end)
            if not budget.open or self._pipeline.complete:
                self._budget = budget = None
        return frames + self._render_next(None)

    def _render_next(self, count: int | None) -> bytes:
        """Render the next tokens, at most `count`."""
        stream, pipeline, start = self._stream, self._pipeline, self._rendered
        end = None if count is None else start + count
        ids = [] if pipeline.complete else stream.tokens[start:end]
        if not ids:
            return b""
        self._rendered = start + len(ids)
        if self._logprobs is not None:
            frame = self._render_logged(self._logprobs, ids, start)
        else:
            events = pipeline.feed(ids)
            frame = self._render(events, []) if events else b""
        if pipeline.complete:
            stream.stop("stop")
        return frame

    def _render_logged(self, logprobs: TextLogprobs, ids: list[int], start: int) -> bytes:
        """Render token by token, each text with the log-probabilities of its tokens."""
        known, frames = self._stream.logprobs, []
        for at, token in enumerate(ids, start):
            logprobs.add(token, known[at] if at < len(known) else None)
            settled = logprobs.settle(self._pipeline.feed([token]))
            frames += [self._render([event], found) for event, found in settled]
            if self._pipeline.complete:
                break
        return b"".join(frames)

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
