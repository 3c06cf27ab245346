"""A request that a router is asked to queued_since, as the dispatcher keeps it."""

from dataclasses import dataclass
from math import inf

from kvmesh.bus.messages import Decision, Refused, RouteRequest, SeqWait
from kvmesh.router.scoring.overlaps import Overlaps


@dataclass(slots=True)
class Ticket:
    """One request on its way through the router. Times are the core's.

    `queued_since` is what its queued_since in the queue goes by: when it `arrived`, here or earlier elsewhere.
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

    def __post_init__(self) -> None:
        self.queued_since = min(self.queued_since, self.arrived)

    @property
    def deadline(self) -> float:
        return self.arrived + self.request.deadline_s
