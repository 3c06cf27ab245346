"""Ticket: a route request with its state in the router."""

from dataclasses import dataclass, field
from math import inf

from kvmesh.bus.messages import Decision, PrefixWait, Refused, RouteRequest, SeqWait
from kvmesh.router.scoring.overlaps import Overlaps


@dataclass(slots=True)
class Ticket:
    """One route request until its placement or refusal. Times are those of the core's clock.

    `queued_since` orders the queue: the time of its arrival here, or earlier at another router.
    `alone`: no other request of its instant is known.
    """

    request: RouteRequest
    arrived: float
    overlaps: Overlaps | None = None
    index_s: float = 0.0
    note: str | None = None
    scored_at: float = 0.0
    lane: str = ""
    waiting: SeqWait | None = None
    result: Decision | Refused | None = None
    queued_since: float = inf
    prefix_waits: list[PrefixWait] = field(default_factory=list)
    alone: bool = False

    def __post_init__(self) -> None:
        self.queued_since = min(self.queued_since, self.arrived)

    @property
    def deadline(self) -> float:
        return self.arrived + self.request.deadline_s
