"""Where tokens arrive: one subject per frontend, one message per engine step.

Sequences that got tokens are flushed together after everything ready has been read, and no
stream more often than once per `interval`, so that tokens ready at once share one frame. The end
of a sequence is no flush: whoever follows the sequence takes the last tokens itself.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from kvmesh.bus.messages import StepOutput
from kvmesh.frontend.dispatch.token_stream import ChunkResult, TokenStream
from kvmesh.frontend.errors import ApiError

log = logging.getLogger(__name__)
step_decoder = msgspec.msgpack.Decoder(StepOutput)


class TokenInbox:
    """Live sequences by attempt id. `on_hole` asks a worker to send tokens again."""

    def __init__(self, interval: float, on_hole: Callable[[TokenStream], None]) -> None:
        self._interval = interval
        self._on_hole = on_hole
        self._live: dict[str, TokenStream] = {}
        self._dirty: list[TokenStream] = []
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def live(self) -> Iterable[TokenStream]:
        return list(self._live.values())

    def add(self, sequence: TokenStream) -> None:
        self._live[sequence.attempt] = sequence

    def remove(self, sequence: TokenStream) -> None:
        self._live.pop(sequence.attempt, None)

    def receive(self, output: StepOutput) -> None:
        """Handle one message."""
        now = self._loop.time()
        for chunk in output.chunks:
            sequence = self._live.get(chunk.request)
            if sequence is None or sequence.ended.is_set():
                continue
            taken = sequence.take(chunk, now)
            if taken is ChunkResult.HOLE:
                self._on_hole(sequence)
            elif taken is ChunkResult.NEW and not sequence.ended.is_set():
                self.wake(sequence, now)

    def wake(self, sequence: TokenStream, now: float) -> None:
        """Have the sequence's consumer called: at once, or when its interval is over."""
        if sequence.dirty:
            return
        sequence.dirty = True
        self._dirty.append(sequence)
        if now - sequence.flushed_at >= self._interval:
            if self._soon is None:
                self._soon = self._loop.call_soon(self._flush)
        elif self._later is None:
            self._later = self._loop.call_later(self._interval, self._flush_late)

    def _flush_late(self) -> None:
        self._later = None
        self._flush()

    def _flush(self) -> None:
        self._soon = None
        dirty, self._dirty = self._dirty, []
        now = self._loop.time()
        for sequence in dirty:
            if now - sequence.flushed_at < self._interval:
                self._dirty.append(sequence)
                continue
            sequence.flushed_at = now
            sequence.dirty = False
            if not sequence.ended.is_set():
                self._call(sequence)
        if self._dirty and self._later is None:
            self._later = self._loop.call_later(self._interval, self._flush_late)

    def _call(self, sequence: TokenStream) -> None:
        try:
            sequence.consumer.ready(sequence)
        except Exception:
            log.exception("cannot answer request %s", sequence.id)
            sequence.fail(ApiError("internal", "the answer could not be written"))
