"""Delivery of tokens from the frontend's subject to their consumers; a message per engine step.

Streams with new tokens are flushed together after every pending message has been read, each at
most once per `interval`, so that tokens that arrive together share a frame. Flushes take at most
half of the time: with very many streams, frames become fewer and longer, and requests are served
beside them. The end of a stream triggers no flush: the task that follows the stream renders its
last tokens.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvmesh.bus.messages import MessageDecoder, StepOutput
from kvmesh.frontend.dispatch.token_stream import ChunkResult, TokenStream
from kvmesh.frontend.errors import ApiError

log = logging.getLogger(__name__)
step_decoder = MessageDecoder(StepOutput)
LONGEST_REST_S = 1.0
FRAME_S = 0.005  # tokens of one stream that are ready within this time share a frame
Consumer: TypeAlias = Callable[[], None]  # renders new tokens on the event loop; must not block


class FlushState:
    """Delivery of one attempt's tokens; only the inbox changes it."""

    __slots__ = ("consumer", "dirty", "flushed_at", "stream")

    def __init__(self, stream: TokenStream, consumer: Consumer) -> None:
        self.stream = stream
        self.consumer = consumer
        self.dirty = False
        self.flushed_at = 0.0


class TokenInbox:
    """Live streams by the two names of their attempts for workers.

    A chunk counts only in a message of the instance that has the attempt.
    """

    def __init__(self, interval: float = FRAME_S) -> None:
        self._interval = self._shortest = interval
        self._states: dict[str, FlushState] = {}
        self._dirty: list[FlushState] = []
        self._soon_handle: asyncio.Handle | None = None
        self._late_handle: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._states) // 2

    def add(self, stream: TokenStream, consumer: Consumer) -> None:
        """Receive the current attempt's tokens; call `consumer` when there are new ones."""
        state = FlushState(stream, consumer)
        self._states[stream.work] = self._states[stream.ref] = state

    def remove(self, stream: TokenStream) -> None:
        """Drop later messages of the current attempt; received tokens are still flushed."""
        self._states.pop(stream.work, None)
        self._states.pop(stream.ref, None)

    def receive(self, output: StepOutput) -> Sequence[TokenStream]:
        """Handle one message; return the streams that lack an earlier one."""
        now = self._loop.time()
        gaps: list[TokenStream] = []
        for chunk in output.chunks:
            state = self._states.get(chunk.request)
            if state is None:
                continue
            stream = state.stream
            if stream.ended.is_set() or output.instance != stream.instance:
                continue
            result = stream.receive(chunk, now)
            if result is ChunkResult.GAP:
                gaps.append(stream)
            elif result is ChunkResult.NEW and not stream.ended.is_set():
                self._schedule(state, now)
        return gaps

    def _schedule(self, state: FlushState, now: float) -> None:
        """Call the consumer at once, or when its interval is over."""
        if state.dirty:
            return
        state.dirty = True
        self._dirty.append(state)
        if now - state.flushed_at >= self._interval:
            if self._soon_handle is None:
                self._soon_handle = self._loop.call_soon(self._flush)
        elif self._late_handle is None:
            self._late_handle = self._loop.call_later(self._interval, self._flush_late)

    def _flush_late(self) -> None:
        self._late_handle = None
        self._flush()

    def _flush(self) -> None:
        self._soon_handle = None
        dirty, self._dirty = self._dirty, []
        now = self._loop.time()
        for state in dirty:
            if now - state.flushed_at < self._interval:
                self._dirty.append(state)
                continue
            state.flushed_at = now
            state.dirty = False
            if not state.stream.ended.is_set():
                self._run_consumer(state)
        took = self._loop.time() - now
        self._interval = max(self._shortest, min(2 * took, LONGEST_REST_S))
        if self._dirty and self._late_handle is None:
            self._late_handle = self._loop.call_later(self._interval, self._flush_late)

    def _run_consumer(self, state: FlushState) -> None:
        try:
            state.consumer()
        except Exception:
            log.exception("cannot render the answer of request %s", state.stream.id)
            state.stream.fail(ApiError("internal", "the answer could not be written"))
