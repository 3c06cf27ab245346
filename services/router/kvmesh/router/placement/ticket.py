"""A request that a router is asked to place, as the dispatcher keeps it."""

from dataclasses import dataclass
from math import inf

from kvmesh.bus.messages import Decision, Refused, RouteRequest, SeqWait
from kvmesh.router.scoring.overlaps import Overlaps


@dataclass(slots=True)
class Ticket:
    """One request on its way through the router. Times are the core's.

    `place` is what its place in the queue goes by: when it `arrived`, here or earlier elsewhere.
    """

    request: RouteRequest
    arrived: float
    overlaps: Overlaps | None = None
    index_s: float = 0.0
    note: str | None = None
    scored: float = 0.0
    lane: str = ""
    waiting: SeqWait | None = None
    result: Decision | Refused | None = None
    place: float = inf

    def __post_init__(self) -> None:
        self.place = min(self.place, self.arrived)

    @property
    def deadline(self) -> float:
        return self.arrived + self.request.deadline_s
