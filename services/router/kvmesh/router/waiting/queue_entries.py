"""Entries of the queue: the position of a request among those that wait in any router."""

from kvmesh.bus.messages import RouteRequest, SeqWait
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.state.fair_classes import fair_class
from kvmesh.router.waiting.batch_lane import TIER, BatchLane
from kvmesh.router.waiting.ticket import Ticket


class QueueEntries:
    """Makes the entries of the requests of `router`, this instance."""

    def __init__(self, core: RouterCore, batch: BatchLane, router: str) -> None:
        self._core = core
        self._batch = batch
        self._router = router

    def entry(self, ticket: Ticket, now: float) -> SeqWait:
        """The entry of a ticket; raises RouteError if no rank may ever run its request."""
        request, epoch = ticket.request, self._core.epoch
        candidates = self._core.choice.candidates(request, ticket.overlaps, now)
        cached = int(candidates.overlap.sum(1).max()) * self._core.table.block_size
        uncached = max(request.tokens - cached, 1)
        arrived = ticket.queued_since + epoch
        return SeqWait(
            request=request.request,
            router=self._router,
            lane=ticket.lane,
            tier=self.tier(request),
            fair_class=fair_class(request.hints),
            key=self.sort_key(request, arrived, uncached),
            cost=uncached,
            arrived=arrived,
            deadline=ticket.deadline + epoch,
            placement=request.placement if ticket.lane else None,
            adapter=request.adapter,
        )

    def tier(self, request: RouteRequest) -> int:
        """The priority tier of a request; batch requests are below all others."""
        return TIER if self._batch.includes(request) else max(request.hints.strict_priority, 0)

    def sort_key(self, request: RouteRequest, arrived: float, uncached: int) -> float:
        """The position of a request in its class, by `queue_order`; the lowest goes first."""
        settings, hints = self._core.settings, request.hints
        priority = max(hints.priority, 0)
        if settings.queue_order == "wspt":
            return -(1 + priority) / uncached
        if settings.queue_order == "lcfs":
            return -arrived
        shift = priority * settings.priority_shift_s
        shift += min(max(hints.latency_sensitivity, 0.0), 1.0) * settings.latency_shift_s
        return arrived - shift - self._core.policies.queue_boost_s(request)
