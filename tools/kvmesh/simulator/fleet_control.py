"""Changes of the simulated fleet by an autoscaler: start-ups, drains and device time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.simulator.autoscaler import FleetTarget
from kvmesh.simulator.fleet import SimulatedWorker
from kvmesh.simulator.options import WorkerOptions
from kvmesh.simulator.virtual_clock import VirtualClock


@dataclass
class FleetRecord:
    """The fleet over time: `sizes` are seconds, ready and starting workers at each change.

    `waited_s` are the seconds in which workers were parked or asleep, and held no device.
    """

    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    ups: int = 0
    downs: int = 0
    switches: int = 0
    promotions: int = 0
    waited_s: float = 0.0
    began: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    cost_s: float = 0.0


@dataclass(frozen=True)
class FleetHooks:
    """Calls of the simulation that change its fleet.

    `join` adds a worker of a group, `drain` lets one leave once its requests have ended, `switch`
    gives one the role of another group, for the requests that come from then on. `park` lets a
    worker of a group wait, the one that was an instance before, or a new one for "", and returns
    its next instance; `unpark` ends the wait of an instance, and `wake` adds it, promoted in so
    many seconds.
    """

    join: Callable[[int], SimulatedWorker]
    drain: Callable[[SimulatedWorker], None]
    switch: Callable[[SimulatedWorker, int], None]
    park: Callable[[int, str], str]
    unpark: Callable[[str], None]
    wake: Callable[[str, float], SimulatedWorker]


class FleetControl:
    """Starts, parks, promotes and drains workers of `groups`.

    A worker occupies its devices from the beginning of its start, or of its promotion if it was
    parked, until its last request has ended.
    """

    def __init__(
        self,
        clock: VirtualClock,
        groups: Sequence[WorkerOptions],
        startup_s: float,
        promotion_s: float,
        hooks: FleetHooks,
    ) -> None:
        self.record = FleetRecord()
        self._clock = clock
        self._costs = [group.cost for group in groups]
        self._parks = [group.parked > 0 for group in groups]
        self._startup_s = startup_s
        self._promotion_s = promotion_s
        self._hooks = hooks
        self._workers: list[list[SimulatedWorker]] = [[] for _ in groups]
        self._starting: list[list[int]] = [[] for _ in groups]
        self._waiting: list[dict[str, float]] = [{} for _ in groups]  # since when
        self._promoting: list[dict[str, float]] = [{} for _ in groups]
        self._to_standby: dict[str, tuple[int, bool]] = {}  # the group, and if it sleeps
        self._cancelled: set[int] = set()
        self._begun_at: dict[int, float] = {}
        self._number = 0

    @property
    def wanted(self) -> list[int]:
        """The workers of each group, with those that start or wait."""
        draining = [group for group, _ in self._to_standby.values()]
        every = (self._workers, self._starting, self._waiting, self._promoting)
        return [
            sum(len(each[group]) for each in every) + draining.count(group)
            for group in range(len(self._costs))
        ]

    def joined(self, group: int, worker: SimulatedWorker, began: float) -> None:
        self._workers[group].append(worker)
        self.record.began[worker.instance] = began
        self._sample()

    def leaving(self, worker: SimulatedWorker) -> int:
        """A worker takes no more requests, and may still finish some; returns its group."""
        group = next(g for g, ready in enumerate(self._workers) if worker in ready)
        self._workers[group].remove(worker)
        self._sample()
        return group

    def removed(self, instance: str, group: int) -> None:
        """Add a worker's time to the totals; one that is to wait does now, or starts again."""
        began = self.record.began.pop(instance, None)
        if began is not None:
            self._account(group, began)
        if (draining := self._to_standby.pop(instance, None)) is not None:
            if draining[1]:
                self._wait(draining[0], instance)
            else:
                self._begin(draining[0])
            self._sample()

    def _stand_by(self, instance: str, sleeps: bool) -> None:
        """Have a worker wait once its requests have ended, after another start unless it `sleeps`.

        An instance that does not serve is ignored.
        """
        for group, ready in enumerate(self._workers):
            worker = next((each for each in ready if each.instance == instance), None)
            if worker is not None:
                self._to_standby[instance] = group, sleeps
                self._hooks.drain(worker)
                return

    def promote(self, instance: str) -> None:
        """A worker that waits takes its device, and serves after the time of a promotion."""
        group = next(g for g, waiting in enumerate(self._waiting) if instance in waiting)
        self.record.waited_s += self._clock.now - self._waiting[group].pop(instance)
        self.record.promotions += 1
        self._promoting[group][instance] = self._clock.now
        self._hooks.unpark(instance)
        self._clock.after(self._promotion_s, lambda: self._woken(group, instance))

    def restart(self, group: int) -> None:
        """Start a worker in place of one that has died, as orchestrators do."""
        self._begin(group)
        self._sample()

    def close(self) -> None:
        """Add the time of the workers that are still starting to the totals."""
        for group, starting in enumerate(self._starting):
            for number in starting:
                self._account_start(group, number)
            starting.clear()
            for since in self._waiting[group].values():
                self.record.waited_s += self._clock.now - since
            for began in self._promoting[group].values():
                self._account(group, began)

    def _account_start(self, group: int, number: int) -> None:
        if not self._parks[group]:
            self._account(group, self._begun_at[number])

    def _account(self, group: int, began: float) -> None:
        seconds = self._clock.now - began
        self.record.device_s += seconds
        self.record.cost_s += seconds * self._costs[group]

    def apply(self, target: FleetTarget) -> None:
        if target.switches or target.standby or target.counts != self.wanted:
            self._resize(target)
        for instance in target.promote:
            self.promote(instance)

    def _resize(self, target: FleetTarget) -> None:
        for instance, group in target.switches.items():
            self._switch(instance, group)
        for instance, sleeps in target.standby.items():
            self._stand_by(instance, sleeps)
        for group, count in enumerate(target.counts):
            have = self.wanted[group]
            if count > have:
                self.record.ups += 1
                for _ in range(count - have):
                    self._begin(group)
            elif count < have:
                self.record.downs += 1
                self._shrink(group, have - count, target)
        self._sample()

    def _switch(self, instance: str, group: int) -> None:
        """Give a worker the role of another group; it counts in its own."""
        ready = (worker for each in self._workers for worker in each)
        worker = next((each for each in ready if each.instance == instance), None)
        if worker is not None:
            self._hooks.switch(worker, group)
            self.record.switches += 1

    def _begin(self, group: int) -> None:
        self._number += 1
        number = self._number
        self._starting[group].append(number)
        self._begun_at[number] = self._clock.now
        took_s = self._startup_s - (self._promotion_s if self._parks[group] else 0.0)
        self._clock.after(took_s, lambda: self._ready(group, number))

    def _ready(self, group: int, number: int) -> None:
        began = self._begun_at.pop(number)
        if number in self._cancelled:
            self._cancelled.discard(number)
            return
        self._starting[group].remove(number)
        if self._parks[group]:
            self._wait(group, "")
            self._sample()
        else:
            self.joined(group, self._hooks.join(group), began)

    def wait(self, group: int) -> None:
        """A worker is parked, from the start of the simulation."""
        self._wait(group, "")

    def _wait(self, group: int, instance: str) -> None:
        self._waiting[group][self._hooks.park(group, instance)] = self._clock.now

    def _woken(self, group: int, instance: str) -> None:
        began = self._promoting[group].pop(instance)
        self.joined(group, self._hooks.wake(instance, self._promotion_s), began)

    def _shrink(self, group: int, count: int, target: FleetTarget) -> None:
        """Stop workers that start, then those named first, then the least busy.

        Where workers park, those that start are not to serve soon: the named ones come first.
        """
        if self._parks[group]:
            named = [w for w in self._workers[group] if w.instance in target.stop][:count]
            for worker in named:
                self._hooks.drain(worker)
            count -= len(named)
        starting = self._starting[group]
        while count and starting:
            number = starting.pop()
            self._cancelled.add(number)
            self._account_start(group, number)
            count -= 1
        if self._parks[group]:
            self._end_waiting(group, count, target.promote)
            return
        order = {instance: position for position, instance in enumerate(target.stop)}
        ready = sorted(
            self._workers[group],
            key=lambda w: (order.get(w.instance, len(order)), len(w.core.scheduler.live)),
        )
        for worker in ready[:count]:
            self._hooks.drain(worker)

    def _end_waiting(self, group: int, count: int, promoted: Sequence[str]) -> None:
        waiting = [instance for instance in self._waiting[group] if instance not in promoted]
        for instance in waiting[:count]:
            self.record.waited_s += self._clock.now - self._waiting[group].pop(instance)
            self._hooks.unpark(instance)

    def _sample(self) -> None:
        ready = sum(map(len, self._workers))
        starting = sum(map(len, self._promoting)) + sum(
            len(each) for each, parks in zip(self._starting, self._parks, strict=True) if not parks
        )
        self.record.sizes.append((self._clock.now, ready, starting))
