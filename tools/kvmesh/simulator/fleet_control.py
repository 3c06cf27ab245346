"""Changes of the simulated fleet by an autoscaler: start-ups, drains and device time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.simulator.autoscaler import FleetTarget
from kvmesh.simulator.fleet import SimulatedWorker
from kvmesh.simulator.virtual_clock import VirtualClock


@dataclass
class FleetRecord:
    """The fleet over time: `sizes` are seconds, ready and starting workers at each change."""

    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    ups: int = 0
    downs: int = 0
    switches: int = 0
    began: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    cost_s: float = 0.0


class FleetControl:
    """Starts and drains workers. `join` adds a worker of a group, `drain` lets one leave.

    `switch` gives a worker the role of another group, for the requests that come from then on.

    `costs` are those of a worker of each group, per hour.
    A worker occupies its devices from the beginning of its start until its last request has ended.
    """

    def __init__(
        self,
        clock: VirtualClock,
        costs: Sequence[float],
        startup_s: float,
        join: Callable[[int], SimulatedWorker],
        drain: Callable[[SimulatedWorker], None],
        switch: Callable[[SimulatedWorker, int], None],
    ) -> None:
        self.record = FleetRecord()
        self._clock = clock
        self._costs = costs
        self._startup_s = startup_s
        self._join = join
        self._drain = drain
        self._switch = switch
        self._workers: list[list[SimulatedWorker]] = [[] for _ in costs]
        self._starting: list[list[int]] = [[] for _ in costs]
        self._cancelled: set[int] = set()
        self._begun_at: dict[int, float] = {}
        self._number = 0

    @property
    def wanted(self) -> list[int]:
        return [
            len(ready) + len(starting)
            for ready, starting in zip(self._workers, self._starting, strict=True)
        ]

    def joined(self, group: int, worker: SimulatedWorker, began: float) -> None:
        self._workers[group].append(worker)
        self.record.began[worker.instance] = began
        self._sample()

    def leaving(self, worker: SimulatedWorker) -> None:
        """A worker takes no more requests; it may still finish some."""
        for ready in self._workers:
            if worker in ready:
                ready.remove(worker)
        self._sample()

    def removed(self, instance: str, group: int) -> None:
        """Add a worker's time to the totals."""
        began = self.record.began.pop(instance, None)
        if began is not None:
            self._account(group, began)

    def restart(self, group: int) -> None:
        """Start a worker in place of one that has died, as orchestrators do."""
        self._begin(group)
        self._sample()

    def close(self) -> None:
        """Add the time of the workers that are still starting to the totals."""
        for group, starting in enumerate(self._starting):
            for number in starting:
                self._account(group, self._begun_at[number])
            starting.clear()

    def _account(self, group: int, began: float) -> None:
        seconds = self._clock.now - began
        self.record.device_s += seconds
        self.record.cost_s += seconds * self._costs[group]

    def apply(self, target: FleetTarget) -> None:
        for instance, group in target.switches.items():
            self._move(instance, group)
        for group, count in enumerate(target.counts):
            have = self.wanted[group]
            if count > have:
                self.record.ups += 1
                for _ in range(count - have):
                    self._begin(group)
            elif count < have:
                self.record.downs += 1
                self._shrink(group, have - count, target.stop)
        self._sample()

    def _move(self, instance: str, group: int) -> None:
        before = next((w for w in self._workers if any(e.instance == instance for e in w)), None)
        if before is not None:
            worker = next(each for each in before if each.instance == instance)
            before.remove(worker)
            self._workers[group].append(worker)
            self._switch(worker, group)
            self.record.switches += 1

    def _begin(self, group: int) -> None:
        self._number += 1
        number = self._number
        self._starting[group].append(number)
        self._begun_at[number] = self._clock.now
        self._clock.after(self._startup_s, lambda: self._ready(group, number))

    def _ready(self, group: int, number: int) -> None:
        began = self._begun_at.pop(number)
        if number in self._cancelled:
            self._cancelled.discard(number)
            return
        self._starting[group].remove(number)
        self.joined(group, self._join(group), began)

    def _shrink(self, group: int, count: int, stop: Sequence[str]) -> None:
        starting = self._starting[group]
        while count and starting:
            number = starting.pop()
            self._cancelled.add(number)
            self._account(group, self._begun_at[number])
            count -= 1
        order = {instance: position for position, instance in enumerate(stop)}
        ready = sorted(
            self._workers[group],
            key=lambda w: (order.get(w.instance, len(order)), len(w.core.scheduler.live)),
        )
        for worker in ready[:count]:
            self._drain(worker)

    def _sample(self) -> None:
        ready = sum(map(len, self._workers))
        starting = sum(map(len, self._starting))
        self.record.sizes.append((self._clock.now, ready, starting))
