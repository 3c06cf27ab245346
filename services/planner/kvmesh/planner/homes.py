"""Workers that serve as those of another pool than the one in which their place counts them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.groups.role_switches import exchangeable
from kvmesh.planner.core.pools import Pool

ELSEWHERE = ""  # stands for the pool of a worker that serves as those of none


@dataclass
class Homes:
    """The workers that serve as those of another pool than the one in which their place has them.

    The place counts a worker in its own pool, its *home*, whatever it serves. `moved_in` is the
    number of workers that each pool has from others, less those that it has given.
    """

    pools: Sequence[Pool]
    moved_in: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _home: dict[str, str] = field(default_factory=dict)
    _served: dict[str, str] = field(default_factory=dict)

    def observe(
        self, place: Mapping[str, PoolState], serving: Callable[[str], str | None]
    ) -> list[tuple[str, str]]:
        """Take over the pools as the place reports them, and the one as which each worker serves.

        `serving` is ELSEWHERE for a worker that serves what no pool does, None for an absent one.
        Returns the source and target of each change that nobody has announced with `switched`: a
        worker that has restarted has its first role again.
        """
        pools = {pool.name: pool for pool in self.pools}
        self._numbers = {pool: state.wanted for pool, state in place.items()}
        self._home = {name: pool for pool, state in place.items() for name in state.workers}
        before, self._served = self._served, {}
        self.moved_in = {}
        for name, home in self._home.items():
            pool = serving(name)
            if pool is None or home not in pools:
                continue
            if pool == ELSEWHERE or (pool in pools and exchangeable(pools[pool], pools[home])):
                self._served[name] = pool
                self._count(home, pool)
        names = [name for name in self._home if before.get(name) != self._served.get(name)]
        return [
            (before.get(name, self._home[name]), self._served.get(name, self._home[name]))
            for name in names
        ]

    def knows(self, name: str) -> bool:
        """True if the place reports a worker of this name."""
        return name in self._home

    def starting(self, pools: Collection[str], ready: Callable[[str], bool]) -> list[str]:
        """The workers of some pools that are not `ready`, as the place reports them."""
        return [name for name, home in self._home.items() if home in pools and not ready(name)]

    def switched(self, name: str, target: str) -> None:
        """The planner has decided that a worker serves as those of pool `target`."""
        home = self._home[name]
        self._count(self._served.pop(name, home), target)
        if target != home:
            self._served[name] = target

    def at_place(self, wanted: Mapping[str, int], stop: Collection[str]) -> dict[str, int]:
        """The changed numbers to ask the place for, so that `wanted` serve as each pool's.

        `stop` are names of workers that end: each leaves its home.
        """
        numbers = {pool: n - self.moved_in.get(pool, 0) for pool, n in wanted.items()}
        for name in stop:
            served = self._served.get(name)
            if served in numbers:
                home = self._home[name]
                numbers[home] = numbers.get(home, self._numbers[home]) - 1
                numbers[served] += 1
        return {pool: max(n, 0) for pool, n in numbers.items() if n != self._numbers.get(pool)}

    def as_served(self) -> dict[str, int]:
        """The numbers that the place reports, with each worker in the pool as which it serves."""
        return {pool: n + self.moved_in.get(pool, 0) for pool, n in self._numbers.items()}

    def _count(self, source: str, target: str) -> None:
        if source != target:
            self.moved_in[source] = self.moved_in.get(source, 0) - 1
            self.moved_in[target] = self.moved_in.get(target, 0) + 1
