"""A request that a router is asked to place, as the dispatcher keeps it."""

from dataclasses import dataclass

from kvmesh.bus.messages import Decision, Refused, RouteRequest, SeqWait
from kvmesh.router.overlaps import Overlaps


@dataclass(slots=True)
class Ticket:
    """One request on its way through the router. Times are the core's."""

    request: RouteRequest
    arrived: float
    overlaps: Overlaps | None = None
    index_s: float = 0.0
    note: str | None = None
    scored: float = 0.0
    lane: str = ""
    waiting: SeqWait | None = None
    result: Decision | Refused | None = None

    @property
    def deadline(self) -> float:
        return self.arrived + self.request.deadline_s
