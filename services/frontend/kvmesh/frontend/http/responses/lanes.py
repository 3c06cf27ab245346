"""The requests of one WebSocket, in lanes. Pure.

A lane runs its requests one after the other, in the order of their arrival; lanes run at once.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from kvmesh.frontend.errors import ApiError, InvalidRequest

R = TypeVar("R")
MAX_RUNNING = 16  # as OpenAI's
MAX_NAMED = 32
MAX_WAITING = 64


class _Waiting(NamedTuple, Generic[R]):
    lane: str
    request: R
    size: int


class Lanes(Generic[R]):
    """The requests that wait, at most `max_bytes`, and the lanes that run one; "" has no name."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[_Waiting[R]] = deque()
        self._bytes = 0
        self._named: set[str] = set()
        self._running: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, lane: str, request: R, size: int) -> None:
        """Have a request of `size` bytes wait; raises InvalidRequest, or ApiError (429)."""
        if lane and lane not in self._named and len(self._named) >= MAX_NAMED:
            raise InvalidRequest(
                f"This connection has used {MAX_NAMED} lanes; use one of them, or another"
                " connection.",
                "stream_id",
                "websocket_stream_limit_reached",
            )
        full = self._bytes + size > self._max_bytes and self._waiting
        if full or len(self._waiting) >= MAX_WAITING:
            raise ApiError(
                "rate_limit",
                f"{len(self._waiting)} requests wait on this connection; send others once a"
                " response has ended.",
                code="websocket_queue_full",
                retry_after=1.0,
            )
        if lane:
            self._named.add(lane)
        self._waiting.append(_Waiting(lane, request, size))
        self._bytes += size

    def take(self) -> list[tuple[str, R]]:
        """The requests that may begin now, with their lanes, which run from now on."""
        begun: list[tuple[str, R]] = []
        kept: deque[_Waiting[R]] = deque()
        while self._waiting and len(self._running) < MAX_RUNNING:
            first = self._waiting.popleft()
            if first.lane in self._running:
                kept.append(first)
                continue
            self._running.add(first.lane)
            self._bytes -= first.size
            begun.append((first.lane, first.request))
        self._waiting.extendleft(reversed(kept))
        return begun

    def end(self, lane: str) -> None:
        """The lane's request has ended."""
        self._running.discard(lane)
