"""Workers that change their role: pools of one kind exchange them before any starts or stops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool

SWITCH_S = 30.0  # longest time until the card of a worker shows its new role
RETRY_S = 600.0


@dataclass(frozen=True)
class PlannedSwitch:
    """A worker that is to serve as those of pool `target` do, instead of those of `source`."""

    instance: str
    source: str
    target: str
    serves: Literal["aggregated", "prefill", "decode"]


class RoleSwitches:
    """The switches under way, and the workers that could not switch lately.

    `able` tells which instances may be asked at all; nobody until someone sets it.
    """

    def __init__(self) -> None:
        self._pending: dict[str, tuple[PlannedSwitch, float]] = {}
        self._refused: dict[str, float] = {}
        self.able: Callable[[str], bool] = lambda _: False

    def may(self, instance: str, now: float) -> bool:
        """True if a worker may be asked to switch."""
        until = self._refused.get(instance, -inf)
        return until <= now and instance not in self._pending and self.able(instance)

    def pending(self, instance: str) -> PlannedSwitch | None:
        """The switch of a worker that is under way."""
        found = self._pending.get(instance)
        return found[0] if found is not None else None

    def ended(self, instance: str) -> None:
        """A worker has switched, or has left."""
        self._pending.pop(instance, None)

    def failed(self, instance: str, now: float) -> PlannedSwitch | None:
        """A worker cannot switch: it is not asked again for RETRY_S seconds."""
        self._refused = {name: until for name, until in self._refused.items() if until > now}
        self._refused[instance] = now + RETRY_S
        found = self._pending.pop(instance, None)
        return found[0] if found is not None else None

    def overdue(self, now: float) -> list[str]:
        """Workers that have not switched in time."""
        return [name for name, (_, began) in self._pending.items() if now - began > SWITCH_S]

    def exchange(
        self, views: Sequence[PoolView], stop: Sequence[str], now: float
    ) -> list[PlannedSwitch]:
        """Begin switches of workers that would stop to pools of their kind that start workers."""
        chosen: list[PlannedSwitch] = []
        for target in (view for view in views if view.pool.kind):
            room = target.starts.pending
            sources = [view for view in views if exchangeable(view.pool, target.pool)]
            for source in sources:
                leaving = [name for name in stop if name in source.cards and self.may(name, now)]
                for instance in leaving[:room]:
                    switch = PlannedSwitch(
                        instance, source.pool.name, target.pool.name, target.pool.serves
                    )
                    self._pending[instance] = switch, now
                    chosen.append(switch)
                room -= len(leaving[:room])
        return chosen


def exchangeable(one: Pool, other: Pool) -> bool:
    """True if the workers of two pools differ in nothing but their role."""
    return bool(one.kind) and one.kind == other.kind and one.name != other.name
