"""The facts from which a decision about the fleet starts, and the actions that it returns."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvmesh.bus.messages import Drain, Promote, Serve, Sleep
from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.groups.candidates import Plan


@dataclass(frozen=True)
class Observation:
    """The facts that no message of the mesh tells; `now` in Unix seconds.

    `place` are the pools as the connector's place reports them, workers on standby included; None
    if it does not reply. `failed`: it could not make the last change. `idle_models` are listed as
    models that may run without workers.
    """

    now: float
    place: Mapping[str, PoolState] | None
    failed: bool = False
    idle_models: Collection[str] = ()


@dataclass(frozen=True)
class Decided:
    """The plan of one model, of which `before` were wanted until now, by pool.

    It has `changed` unless it repeats the last one. It is `due` on the stream of decisions if it
    has, or if none was recorded for a while.
    """

    model: str
    plan: Plan
    before: Mapping[str, int]
    changed: bool
    due: bool


@dataclass(frozen=True)
class Unplanned:
    """The planner of one model fails; the others go on."""

    model: str
    error: Exception


@dataclass(frozen=True)
class ScaleFleet:
    """Have the place run these numbers of workers, those named in `stop` ending first."""

    pools: dict[str, int]
    stop: list[str]


@dataclass(frozen=True)
class WorkerCommand:
    """Have a worker, of `pool` from then on, change its state or its role."""

    model: str
    pool: str
    instance: str
    name: str
    order: Promote | Sleep | Drain | Serve


Action = Decided | Unplanned | ScaleFleet | WorkerCommand
