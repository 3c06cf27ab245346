"""The parts of a model's planner that its groups of pools use."""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.planner.core.batch_work import BatchWork
from kvmesh.planner.core.demand import Demand
from kvmesh.planner.core.groups.role_switches import RoleSwitches
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.core.traffic import ObservedTraffic
from kvmesh.planner.core.victims import CacheWorth


class SaturatedPools(Protocol):
    """A group of pools, as far as others compare themselves with it."""

    def saturation(self) -> float:
        """The fuller of KV memory and of two steps of prefill, of the mean worker; 1 is full."""
        ...


class PlannedModel(Protocol):
    """The planner of one model.

    `pools` and `groups` are all of the model; `devices_elsewhere` are devices of other models.
    """

    options: PlanOptions
    traffic: ObservedTraffic
    demand: Demand
    worth: CacheWorth
    switches: RoleSwitches
    batch: BatchWork
    pools: list[PoolView]
    devices_elsewhere: int

    @property
    def groups(self) -> Sequence[SaturatedPools]: ...

    @property
    def promises(self) -> list[Promise]: ...

    def requests_without_worker(self, now: float) -> int: ...

    def idle(self, now: float) -> bool: ...

    def quiet_s(self, now: float) -> float: ...

    def proven(self, now: float) -> bool: ...
