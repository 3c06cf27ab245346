"""The interface of autoscalers of a simulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvmesh.bus.messages import Instance, Load, RouteEvent, SeqEvent


@dataclass(frozen=True)
class FleetTarget:
    """Workers wanted per group, and instances to stop first where a group shrinks.

    `switches` are instances that join another group before, with the role of that group. Those of
    `sleep` wait, once their requests have ended, and count as workers of their group still.
    """

    counts: Sequence[int]
    stop: Sequence[str] = ()
    switches: Mapping[str, int] = field(default_factory=dict)
    sleep: Sequence[str] = ()


class Autoscaler(Protocol):
    """Decides the number of workers of each group, every `interval_s` seconds of virtual time.

    It receives the messages that a planner receives from the bus of a live mesh.
    """

    interval_s: float

    def joined(self, card: Instance, group: int, now: float) -> None:
        """A worker is ready, or has begun to drain."""
        ...

    def left(self, card: Instance) -> None:
        """A worker has left."""
        ...

    def on_loads(self, loads: list[Load], now: float) -> None: ...

    def on_sequences(self, events: list[SeqEvent]) -> None: ...

    def on_route(self, event: RouteEvent, now: float) -> None: ...

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget | None:
        """The fleet to have; `wanted` are ready and starting workers per group. None: no change."""
        ...


@runtime_checkable
class PromotingAutoscaler(Autoscaler, Protocol):
    """Autoscaler that has workers promoted; in groups where some wait, counts include those."""

    def parked(self, card: Instance, group: int, now: float) -> None:
        """A worker waits, parked or asleep."""
        ...

    def unparked(self, instance: str) -> None:
        """A worker waits no longer."""
        ...

    def promote(self, now: float) -> list[str]:
        """The instances to promote now."""
        ...

    def surplus(self, now: float) -> list[tuple[str, bool]]:
        """Ready workers that are too many: each is to sleep, or to park after another start."""
        ...
