"""Ways to bring a copy of weights to many workers, for comparison."""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from kvmesh.simulator.virtual_clock import VirtualClock
from kvmesh.simulator.weights.fanout import Fanout, FanoutResult
from kvmesh.simulator.weights.links import FairNetwork, LinkEnd
from kvmesh.simulator.weights.options import FanoutOptions


class _WholeCopies:
    """Targets that each take one whole copy from one place, without failures."""

    def __init__(self, options: FanoutOptions) -> None:
        self.options = options
        self.clock = VirtualClock()
        self.network = FairNetwork(self.clock)
        self.times: list[float] = []
        self.last_end = 0.0

    def new_end(self) -> LinkEnd:
        return LinkEnd(self.options.link_bytes_per_s)

    def run(self, start: Callable[[int], None], sources: list[LinkEnd]) -> FanoutResult:
        for i in range(self.options.targets):
            self.clock.at(
                self.options.start_of(i) + self.options.discovery_s,
                lambda i=i: start(i),  # type: ignore[misc]
            )
        self.clock.run()
        copies = sum(source.sent for source in sources) / self.options.size
        return FanoutResult(max(self.times), median(self.times), self.last_end, copies)

    def finished(self, target: int) -> None:
        self.last_end = self.clock.now + self.options.latency_s
        self.times.append(self.last_end - self.options.start_of(target))


def central_store(options: FanoutOptions) -> FanoutResult:
    """All targets read from one store at once."""
    copies = _WholeCopies(options)
    store = LinkEnd(options.central_bytes_per_s)

    def start(target: int) -> None:
        end = copies.new_end()
        copies.network.transfer(store, end, options.size, lambda: copies.finished(target))

    return copies.run(start, [store])


def finished_sources(options: FanoutOptions) -> FanoutResult:
    """Each target reads a whole copy from a source that was finished when the target started.

    Targets take these sources in turn.
    """
    copies = _WholeCopies(options)
    seeds = [copies.new_end() for _ in range(options.seeds)]
    sources = deque(seeds)

    def start(target: int) -> None:
        source, end = sources[0], copies.new_end()
        sources.rotate(-1)

        def done() -> None:
            copies.finished(target)
            sources.appendleft(copies.new_end())

        copies.network.transfer(source, end, options.size, done)

    return copies.run(start, seeds)


def one_by_one(options: FanoutOptions) -> FanoutResult:
    """Each finished source sends one whole copy at a time; targets wait for a free one."""
    copies = _WholeCopies(options)
    seeds = [copies.new_end() for _ in range(options.seeds)]
    free, waiting = deque(seeds), deque[int]()

    def match() -> None:
        while free and waiting:
            source, target = free.popleft(), waiting.popleft()
            end = copies.new_end()

            def done(source: LinkEnd = source, target: int = target) -> None:
                copies.finished(target)
                free.extend((source, copies.new_end()))
                match()

            copies.network.transfer(source, end, options.size, done)

    def start(target: int) -> None:
        waiting.append(target)
        match()

    return copies.run(start, seeds)


def least_time(options: FanoutOptions) -> float:
    """Seconds below which no way brings the last of targets that start at once its copy.

    One transfer, and a chunk's time for each doubling of the workers that have the last chunk.
    """
    chunk_s = options.chunk_bytes / options.link_bytes_per_s
    doublings = math.ceil(math.log2(options.targets / options.seeds + 1))
    return options.discovery_s + options.transfer_s + (doublings - 1) * chunk_s


def stream(options: FanoutOptions) -> FanoutResult:
    """The mesh: targets take chunks from several others and pass them on at once."""
    return Fanout(options).run()


TOPOLOGIES: dict[str, Callable[[FanoutOptions], FanoutResult]] = {
    "central store": central_store,
    "finished sources": finished_sources,
    "finished, one by one": one_by_one,
    "stream": stream,
}
