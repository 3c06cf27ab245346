"""The pools as which workers serve, where their place counts them in others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.groups.role_switches import exchangeable
from kvmesh.planner.core.pools import Pool

ELSEWHERE = ""  # stands for the pool of a worker that serves as those of none


@dataclass
class PoolAssignment:
    """The place counts a worker in its own pool, its *home*, whatever it serves."""

    pools: Sequence[Pool]
    _numbers: dict[str, int] = field(default_factory=dict)
    _home: dict[str, str] = field(default_factory=dict)
    _served: dict[str, str] = field(default_factory=dict)  # of those that serve elsewhere

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
        for name, home in self._home.items():
            pool = serving(name)
            if pool in (None, home) or home not in pools:
                continue
            if pool == ELSEWHERE or (pool in pools and exchangeable(pools[pool], pools[home])):
                self._served[name] = pool
        return [
            (before.get(name, home), self._served.get(name, home))
            for name, home in self._home.items()
            if before.get(name) != self._served.get(name)
        ]

    def knows(self, name: str) -> bool:
        """True if the place reports a worker of this name."""
        return name in self._home

    def starting(self, pools: Collection[str], ready: Callable[[str], bool]) -> list[str]:
        """The workers of some pools that are not `ready`, as the place reports them."""
        return [name for name, home in self._home.items() if home in pools and not ready(name)]

    def switched(self, name: str, target: str) -> None:
        """The planner has decided that a worker serves as those of pool `target`."""
        self._served[name] = target
        if target == self._home[name]:
            del self._served[name]

    def at_place(self, wanted: Mapping[str, int], stop: Collection[str]) -> dict[str, int]:
        """The changed numbers to ask the place for, so that `wanted` serve as each pool's.

        `stop` are names of workers that end: each leaves its home.
        """
        numbers = {pool: n - self._moved_in(pool) for pool, n in wanted.items()}
        for name in stop:
            served = self._served.get(name)
            if served in numbers:
                home = self._home[name]
                numbers[home] = numbers.get(home, self._numbers[home]) - 1
                numbers[served] += 1
        return {pool: max(n, 0) for pool, n in numbers.items() if n != self._numbers.get(pool)}

    def as_served(self) -> dict[str, int]:
        """The numbers that the place reports, with each worker in the pool as which it serves."""
        return {pool: n + self._moved_in(pool) for pool, n in self._numbers.items()}

    def _moved_in(self, pool: str) -> int:
        """The workers that a pool has from others, less those that it has given."""
        return sum(
            (served == pool) - (self._home[name] == pool) for name, served in self._served.items()
        )
