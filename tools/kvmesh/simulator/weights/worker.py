"""A simulated worker that takes chunks from others and serves those it has."""

from collections import deque
from collections.abc import Mapping

from kvmesh.simulator.virtual_clock import VirtualClock
from kvmesh.simulator.weights.links import FairNetwork, LinkEnd
from kvmesh.simulator.weights.options import SLOW_FACTOR, FanoutOptions, Fault
from kvmesh.weights.stream import ChunkRequest, Failure, StreamPlan

_LATE_S = 0.25  # between looks for late answers
MARKS = 128
_Key = tuple[str, int]


class FanoutWorker:
    """`have` is its bitmap as others read it; a seed has all chunks and no plan."""

    def __init__(
        self,
        name: str,
        options: FanoutOptions,
        clock: VirtualClock,
        network: FairNetwork,
        plan: StreamPlan | None,
    ) -> None:
        self.name = name
        self.plan = plan
        self.up = LinkEnd(options.link_bytes_per_s)
        self.down = LinkEnd(options.link_bytes_per_s)
        self.fault: Fault | None = None
        self.finished_at: float | None = None
        self.heads: list[float] = []  # times at which the first missing chunk moved on
        self.duplicates = self.wrong = 0
        self._options = options
        self._clock = clock
        self._network = network
        self._sizes = options.sizes
        self._others: Mapping[str, FanoutWorker] = {}
        self.have = bytearray([plan is None]) * len(self._sizes)
        self._requests: dict[_Key, ChunkRequest] = {}
        self._serving: dict[_Key, FanoutWorker] = {}  # by target and chunk
        self._waiting: dict[_Key, FanoutWorker] = {}
        self._marked: deque[int] = deque()
        self._wake = float("inf")

    @property
    def complete(self) -> bool:
        return self.plan is None or self.plan.done

    @property
    def works(self) -> bool:
        return self.fault not in ("killed", "frozen")

    def start(self, others: Mapping[str, "FanoutWorker"]) -> None:
        """Look for late answers from now on; `others` are all workers."""
        self._others = others
        self._watch()

    def meet(self, names: list[str]) -> None:
        """Others have answered this worker's question for sources."""
        if self.plan is not None and self.works:
            for name in names:
                self.plan.join(name, self._clock.now, self._others[name].complete)
            self._act()

    def strike(self, fault: Fault) -> None:
        """Something happens to this worker."""
        self.fault = fault
        if fault == "lying":
            return
        for end in (self.up, self.down):
            if fault == "slow":
                self._network.reshape(end, end.bytes_per_s / SLOW_FACTOR)
            else:
                self._network.close(end)
        asked = {**self._serving, **self._waiting} if fault == "killed" else {}
        for (_, chunk), target in asked.items():
            self._refuse(target, chunk, "lost")

    def serve(self, target: "FanoutWorker", chunk: int) -> None:
        """A request has arrived."""
        if self.fault == "frozen":
            return
        if self.fault == "killed":
            self._refuse(target, chunk, "lost")
        elif self.have[chunk] not in (1, 3) and self.fault != "lying":
            self._refuse(target, chunk, "absent")
        elif len(self._serving) < self._options.slots:
            self._send(target, chunk)
        elif len(self._waiting) < self._options.queue:
            self._waiting[target.name, chunk] = target
            self._mark(chunk)
        else:
            self._refuse(target, chunk, "busy")

    def end(self, target: "FanoutWorker") -> None:
        """A target has closed its connection."""
        for key in [key for key in self._serving if key[0] == target.name]:
            del self._serving[key]
        for key in [key for key in self._waiting if key[0] == target.name]:
            del self._waiting[key]
        self._network.cut(self.up, target.down)
        self._next()

    def bitmap(self) -> bytes | None:
        """Its chunks as others read them; None if it does not answer."""
        if not self.works:
            return None
        return bytes([1]) * len(self.have) if self.fault == "lying" else bytes(self.have)

    def _mark(self, chunk: int) -> None:
        """Others see that the chunk was sent, until as many as `MARKS` others were."""
        if self.have[chunk] == 1:
            self.have[chunk] = 3
            self._marked.append(chunk)
            if len(self._marked) > MARKS:
                self.have[self._marked.popleft()] = 1

    def _next(self) -> None:
        while self._waiting and len(self._serving) < self._options.slots:
            key = next(iter(self._waiting))
            self._send(self._waiting.pop(key), key[1])

    def _send(self, target: "FanoutWorker", chunk: int) -> None:
        self._serving[target.name, chunk] = target
        self._mark(chunk)
        size = self._sizes[chunk]
        self._network.transfer(self.up, target.down, size, lambda: self._sent(target, chunk))

    def _sent(self, target: "FanoutWorker", chunk: int) -> None:
        self._serving.pop((target.name, chunk), None)
        self._next()
        failure: Failure | None = "corrupt" if self.fault == "lying" else None
        self._clock.after(
            self._options.latency_s, lambda: target._answered(self.name, chunk, failure)
        )

    def _refuse(self, target: "FanoutWorker", chunk: int, failure: Failure) -> None:
        self._clock.after(
            self._options.latency_s, lambda: target._answered(self.name, chunk, failure)
        )

    def _answered(self, source: str, chunk: int, failure: Failure | None) -> None:
        """A chunk has come, or the news of a failure."""
        if self.plan is None or not self.works:
            return
        if failure is not None:
            self.wrong += failure == "corrupt"
            self._fail(source, chunk, failure)
        else:
            self._requests.pop((source, chunk), None)
            if not self.plan.arrived(source, chunk, self._clock.now):
                self.duplicates += 1
            else:
                self.have[chunk] = 1
                if self.plan.done:
                    self.finished_at = self._clock.now
        self._act()

    def _fail(self, source: str, chunk: int | None, failure: Failure) -> None:
        assert self.plan is not None
        ended = self.plan.failed(source, chunk, failure, self._clock.now)
        if chunk is not None:
            ended.append(chunk)
        for each in ended:
            if self._requests.pop((source, each), None) and self.have[each] == 2:
                self.have[each] = 0
        if failure not in ("busy", "absent"):
            self._others[source].end(self)

    def _act(self) -> None:
        """Send what the plan asks for; wake when it may ask for more."""
        if self.plan is None or self.plan.done:
            return
        now, latency = self._clock.now, self._options.latency_s
        for request in self.plan.requests(now):
            self._requests[request.source, request.chunk] = request
            if self.have[request.chunk] == 0:
                self.have[request.chunk] = 2
            source = self._others[request.source]
            self._clock.after(latency, lambda s=source, c=request.chunk: s.serve(self, c))  # type: ignore[misc]
        if polls := self.plan.polls(now):
            self._clock.after(latency, lambda: self._read(polls))
        wake = self.plan.wake_at(now)
        if wake is not None and wake < self._wake:
            self._wake = wake
            self._clock.at(wake, lambda: self._woken(wake))

    def _woken(self, time: float) -> None:
        if time == self._wake and self.works:
            self._wake = float("inf")
            self._act()

    def _read(self, names: list[str]) -> None:
        maps = [(name, self._others[name].bitmap()) for name in names]
        self._clock.after(self._options.latency_s, lambda: self._learn(maps))

    def _learn(self, maps: list[tuple[str, bytes | None]]) -> None:
        if self.plan is None or not self.works:
            return
        for name, bits in maps:
            if bits is not None:
                self.plan.learn(name, bits, self._clock.now)
            elif self._others[name].fault == "killed":
                self._fail(name, None, "lost")
        self._act()

    def _watch(self) -> None:
        if self.plan is None or self.plan.done or not self.works:
            return
        now = self._clock.now
        late = [key for key, request in self._requests.items() if request.deadline <= now]
        for source, chunk in late:
            if (source, chunk) in self._requests:
                self._fail(source, chunk, "timeout")
        self._act()
        self._clock.after(_LATE_S, self._watch)
