"""The interface of autoscalers of a simulated fleet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.bus.messages import Instance, Load, RouteEvent, SeqEvent, WorkerState


@dataclass(frozen=True)
class FleetTarget:
    """Workers wanted per group, those on standby included, and changes of single instances.

    `stop` are to be stopped first where a group shrinks. `switches` get the role of another group,
    and count in their own. Those of `standby` wait once their requests have ended: they sleep if
    True, else they start anew. Those of `promote` serve again.
    """

    counts: list[int]
    stop: list[str] = field(default_factory=list)
    switches: dict[str, int] = field(default_factory=dict)
    standby: dict[str, bool] = field(default_factory=dict)
    promote: list[str] = field(default_factory=list)


class Autoscaler(Protocol):
    """Decides the number of workers of each group, every `interval_s` seconds of virtual time.

    It receives the messages that a planner receives from the bus of a live mesh.
    """

    interval_s: float

    def on_worker(self, card: Instance, state: WorkerState, group: int, now: float) -> None:
        """A worker, which serves as those of `group`, has come into a state."""
        ...

    def on_loads(self, loads: list[Load], now: float) -> None: ...

    def on_sequences(self, events: list[SeqEvent]) -> None: ...

    def on_route(self, event: RouteEvent, now: float) -> None: ...

    def promote(self, now: float) -> list[str]:
        """The instances on standby to promote now, since others have left or are missing."""
        ...

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget:
        """The fleet to have; `wanted` are the workers of each group, with those that start."""
        ...
