"""Output of recent requests, to resend chunks that a frontend missed."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from kvmesh.bus.messages import Chunk, Tokens, Work
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.requests.device_time import DeviceTime

NOTHING_ELSE = (None,) * 5  # but tokens
TAIL_TOKENS = 256  # of each request, more than a broken connection may have lost
TAIL_S = 3.0  # after the end of a request, the break of a connection has been noticed
VECTORS_BYTES = 64 << 20  # of ended requests, from which on the oldest are dropped
DEVICE_TIME_S = 1.0  # of a request that runs on, its device time is sent at most this often


class RequestOutput:
    """The output of one request, from its token `first` on.

    It is `name` in its chunks and `end_name` in the last one, by which `kvmesh tail` knows it.
    """

    __slots__ = (
        "accepted_at",
        "adapter",
        "cached",
        "decode",
        "device_s",
        "end_name",
        "error",
        "finish",
        "first",
        "frontend",
        "handoff",
        "invalid",
        "logprobs",
        "name",
        "rank",
        "retention",
        "start",
        "timed_at",
        "tokens",
        "vectors",
        "waited_s",
    )

    def __init__(
        self,
        name: str,
        end_name: str,
        frontend: str,
        first: int,
        retention: list[str] | None,
        decode: str | None,
        adapter: str | None,
        rank: int,
        start: float,
        now: float,
    ) -> None:
        self.name = name
        self.end_name = end_name
        self.accepted_at = now
        self.waited_s: float | None = None
        self.frontend = frontend
        self.rank = rank
        self.start = start
        self.timed_at = 0.0
        self.device_s: float | None = None
        self.adapter = adapter
        self.first = first
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.cached: list[int] | None = None
        self.finish: str | None = None
        self.error: str | None = None
        self.handoff: dict[str, Any] | None = None
        self.retention = retention
        self.decode = decode
        self.invalid = False
        self.vectors: list[bytes] | None = None

    def append(self, delta: OutputDelta, device_s: float | None) -> Tokens:
        """Append a delta; return it as a chunk, with the device time so far if it is due."""
        self.device_s = device_s
        offset = self.first + len(self.tokens)
        self.tokens += delta.tokens
        told = delta.finish, delta.cached, delta.logprobs, delta.admitted_at, device_s
        if told == NOTHING_ELSE:
            return Tokens(self.name, offset, delta.tokens)
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        if delta.cached is not None:
            self.cached = delta.cached
            self.retention = delta.retention or self.retention
        if delta.admitted_at is not None:
            self.waited_s = max(delta.admitted_at - self.accepted_at, 0.0)
        self.finish, self.error, self.handoff = delta.finish, delta.error, delta.handoff
        self.decode = delta.decode or self.decode
        self.invalid, self.vectors = delta.invalid, delta.vectors
        return Chunk(
            self.name if delta.finish is None else self.end_name,
            offset,
            delta.tokens,
            delta.finish,
            delta.error,
            delta.cached,
            delta.logprobs,
            delta.handoff,
            self.retention if delta.cached is not None else None,
            self.decode if delta.finish is not None else None,
            delta.invalid,
            device_s,
            self.waited_s if delta.admitted_at is not None else None,
            delta.vectors,
        )

    def chunk_from(self, offset: int) -> Chunk:
        """All output from the `offset`-th token on, as one chunk."""
        at = max(0, offset - self.first)
        logprobs = self.logprobs[at:] or None
        tokens = self.tokens[at:]
        return Chunk(
            self.name,
            self.first + at,
            tokens,
            self.finish,
            self.error,
            self.cached,
            logprobs,
            self.handoff,
            self.retention if self.cached is not None else None,
            self.decode if self.finish is not None else None,
            self.invalid,
            self.device_s,
            self.waited_s,
            self.vectors,
        )

    @property
    def vector_bytes(self) -> int:
        return sum(map(len, self.vectors or ()))


class OutputBuffer:
    """Live requests and those that ended less than `retain_s` seconds ago."""

    def __init__(self, retain_s: float = 10.0) -> None:
        self.device_time = DeviceTime()
        self._retain_s = retain_s
        self._by_request: dict[str, RequestOutput] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._vector_bytes = 0
        self.live_count = 0

    def __contains__(self, request: str) -> bool:
        return request in self._by_request

    @property
    def live(self) -> list[str]:
        """The ids of requests that have not ended."""
        return [request for request, o in self._by_request.items() if o.finish is None]

    @property
    def frontends(self) -> set[str]:
        """The frontends of these requests."""
        return {output.frontend for output in self._by_request.values()}

    def live_with(self, adapter: str) -> int:
        """The number of requests of an adapter that have not ended."""
        found = (o for o in self._by_request.values() if o.adapter == adapter)
        return sum(output.finish is None for output in found)

    def live_of(self, frontend: str) -> list[str]:
        """The requests of a frontend that have not ended."""
        return [r for r in self.live if self._by_request[r].frontend == frontend]

    def drop_frontend(self, frontend: str) -> None:
        """Drop all requests of a frontend."""
        for request in [r for r, o in self._by_request.items() if o.frontend == frontend]:
            self._forget(self._by_request.pop(request))

    def start(
        self,
        work: Work,
        retention: list[str] | None = None,
        decode: str | None = None,
        now: float = 0.0,
        name: str = "",
    ) -> None:
        """Start a request, which its frontend calls `name`, by default as the engine does.

        `retention` goes out with its first tokens, `decode` with its last.

        Both apply only if the engine reports no outcomes.
        """
        self._by_request[work.request] = RequestOutput(
            work.ref or name or work.request,
            name or work.request,
            work.frontend,
            work.generated,
            retention,
            decode,
            work.adapter,
            work.rank,
            self.device_time.begin(work.rank, now),
            now,
        )
        self.live_count += 1

    def drop(self, request: str) -> None:
        """Drop a request that never began."""
        output = self._by_request.pop(request, None)
        if output is not None:
            self._forget(output)

    def add(self, deltas: Iterable[OutputDelta], now: float) -> dict[str, list[Tokens]]:
        """Number the tokens and group them by frontend; output of ended requests is dropped."""
        chunks: dict[str, list[Tokens]] = {}
        for delta in deltas:
            output = self._by_request.get(delta.request)
            if output is None or output.finish is not None:
                continue
            of_frontend = chunks.get(output.frontend)
            if of_frontend is None:
                of_frontend = chunks[output.frontend] = []
            if delta.finish is None and now - output.timed_at < DEVICE_TIME_S:
                device_s = None
            else:
                device_s = self._device_s(output, delta.finish is not None, now)
            of_frontend.append(output.append(delta, device_s))
            if delta.finish is not None:
                self._ended.append((now, delta.request))
                self._vector_bytes += output.vector_bytes
                self.live_count -= 1
        if self._ended and self._is_due(now):
            self._expire(now)
        return chunks

    def output_from(self, request: str, offset: int) -> tuple[str, Chunk] | None:
        """The frontend of a request and its output from `offset` on; None if unknown."""
        output = self._by_request.get(request)
        if output is None:
            return None
        return output.frontend, output.chunk_from(offset)

    def tails(self, now: float) -> dict[str, list[Chunk]]:
        """The last output of requests that run or have just ended, by frontend."""
        ended = {request for at, request in self._ended if now - at <= TAIL_S}
        tails: dict[str, list[Chunk]] = {}
        for request, output in self._by_request.items():
            begun = output.tokens or output.finish is not None
            if begun and (output.finish is None or request in ended):
                at = output.first + max(len(output.tokens) - TAIL_TOKENS, 0)
                tails.setdefault(output.frontend, []).append(output.chunk_from(at))
        return tails

    def _device_s(self, output: RequestOutput, ends: bool, now: float) -> float | None:
        if ends:
            return self.device_time.end(output.rank, output.start, now) or None
        output.timed_at = now
        return self.device_time.since(output.rank, output.start, now) or None

    def _forget(self, output: RequestOutput) -> None:
        self._vector_bytes -= output.vector_bytes
        if output.finish is None:
            self.device_time.end(output.rank, output.start)
            self.live_count -= 1

    def _is_due(self, now: float) -> bool:
        """True if the oldest of the ended requests is to be dropped."""
        return now - self._ended[0][0] > self._retain_s or self._vector_bytes > VECTORS_BYTES

    def _expire(self, now: float) -> None:
        while self._ended and self._is_due(now):
            output = self._by_request.pop(self._ended.popleft()[1], None)
            if output is not None:
                self._forget(output)
