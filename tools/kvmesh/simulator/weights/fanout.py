"""The simulation of a fan-out: one seed's copy reaches many workers."""

import random
from dataclasses import dataclass
from statistics import median

from kvmesh.simulator.virtual_clock import VirtualClock
from kvmesh.simulator.weights.links import FairNetwork
from kvmesh.simulator.weights.options import FanoutOptions, Fault
from kvmesh.simulator.weights.worker import FanoutWorker
from kvmesh.weights.stream import StreamPlan

_END_S = 3600.0


@dataclass(frozen=True)
class FanoutResult:
    """Times are seconds from a target's start until it has all chunks.

    `last_end` is the time from the first start until the last target has all. Targets that were
    struck by a fault are not counted. `seed_copies` are the bytes that the seeds sent, in
    copies; `duplicates` the chunks that came twice; `wrong` those with wrong bytes; `unfinished`
    the targets which did not get all within an hour.
    """

    last: float
    median: float
    last_end: float
    seed_copies: float
    duplicates: int = 0
    wrong: int = 0
    unfinished: int = 0


class Fanout:
    """One run; `run` may be called once."""

    def __init__(self, options: FanoutOptions) -> None:
        self._options = options
        self._clock = VirtualClock()
        self._random = random.Random(options.seed)
        network = FairNetwork(self._clock)
        self._seeds = [
            FanoutWorker(f"seed{i}", options, self._clock, network, None)
            for i in range(options.seeds)
        ]
        sizes = options.sizes
        self._targets = [
            FanoutWorker(
                f"target{i}",
                options,
                self._clock,
                network,
                StreamPlan(sizes, options.fetch, f"target{i}"),
            )
            for i in range(options.targets)
        ]
        self._workers = {each.name: each for each in (*self._seeds, *self._targets)}
        self._started = list(self._seeds)

    def run(self) -> FanoutResult:
        options = self._options
        for i, target in enumerate(self._targets):
            self._clock.at(options.start_of(i), lambda t=target: self._start(t))  # type: ignore[misc]
        self._plan_faults()
        self._clock.at(_END_S, self._clock.stop)
        self._clock.run()
        sound = [(i, t) for i, t in enumerate(self._targets) if t.fault is None]
        ended = [(i, t.finished_at) for i, t in sound if t.finished_at is not None]
        times = [end - options.start_of(i) for i, end in ended]
        return FanoutResult(
            max(times),
            median(times),
            max(end for _, end in ended),
            sum(seed.up.sent for seed in self._seeds) / options.size,
            sum(target.duplicates for target in self._targets),
            sum(target.wrong for target in self._targets),
            len(sound) - len(ended),
        )

    def _start(self, target: FanoutWorker) -> None:
        self._started.append(target)
        target.start(self._workers)
        self._clock.after(self._options.discovery_s, lambda: self._discover(target))

    def _discover(self, target: FanoutWorker) -> None:
        """A sample of those that have started answers; others are asked for later."""
        if target.complete or not target.works:
            return
        assert target.plan is not None
        known = target.plan.sources
        wanted = self._options.sample - len(known)
        fresh = [w.name for w in self._started if w is not target and w.name not in known]
        answering = [name for name in fresh if self._workers[name].works]
        target.meet(self._random.sample(answering, min(max(wanted, 0), len(answering))))
        self._clock.after(self._options.refresh_s, lambda: self._discover(target))

    def _plan_faults(self) -> None:
        options = self._options
        pool = [*self._targets, *self._seeds[1:]]
        self._random.shuffle(pool)
        for fault, share in options.faults.items():
            for _ in range(round(share * len(pool))):
                self._plan_fault(pool.pop(), fault)

    def _plan_fault(self, worker: FanoutWorker, fault: Fault) -> None:
        time = self._random.random() * self._options.fault_within * self._options.transfer_s
        self._clock.at(time, lambda: worker.strike(fault))
