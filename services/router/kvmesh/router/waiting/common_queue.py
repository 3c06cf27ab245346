"""Requests that wait for a rank with free capacity, in one order for all routers.

Every router holds the waiting requests of all routers, from the active-sequence stream. The stream
defines the order: a request enters the queue when its event arrives there. A router places only its
own requests, each when it is first among those with free capacity.
"""

from collections.abc import Collection, Iterator
from math import inf

from kvmesh.bus.messages import RouteRequest, SeqAdd, SeqEvent, SeqWait
from kvmesh.router.config import fair_weights
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.batch_lane import BatchLane
from kvmesh.router.waiting.fair_order import BATCH, FairOrder
from kvmesh.router.waiting.free_capacity import FreeCapacity, lane_of
from kvmesh.router.waiting.queue_entries import QueueEntries
from kvmesh.router.waiting.ticket import Ticket

REPLICA_PATIENCE_S = 0.25  # for the replica whose request is first to place it
SKIP_REPLICA_S = 5.0  # the queue does not wait for a replica that was too slow
ECHO_PATIENCE_S = 0.5  # for this replica's entry to arrive on the stream
NEWCOMER_S = 5.0  # for the card of a new replica to arrive
LATE_S = 5.0  # after the deadline, for another replica's event to arrive


class CommonQueue:
    """The queue as `router`, this instance, knows it, with the tickets of its own entries."""

    def __init__(
        self, core: RouterCore, batch: BatchLane, entries: QueueEntries, router: str
    ) -> None:
        settings = core.settings
        self._core = core
        self._router = router
        self._settings = settings
        self.order = FairOrder(
            settings.queue_quantum, fair_weights(settings), settings.starvation_s
        )
        self._batch = batch
        self._capacity = FreeCapacity(core, batch, self.order)
        self._entries = entries
        self._own: dict[str, Ticket] = {}
        self._stalled: tuple[str, float] | None = None
        self._skipped_until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, request: str) -> bool:
        return request in self._own

    @property
    def tickets(self) -> list[Ticket]:
        return list(self._own.values())

    @property
    def tokens(self) -> int:
        """Uncached tokens of all entries."""
        return sum(entry.cost for entry in self.order.entries.values())

    def size(self, batch: bool) -> int:
        """The number of entries of batch requests, or of others."""
        return self.order.size(batch)

    # entries

    def must_wait(self, ticket: Ticket) -> bool:
        """True if a request has to enter the queue; sets its lane. Raises RouteError."""
        request = ticket.request
        if self._batch.includes(request):
            ticket.lane = BATCH + lane_of(request)
            return True
        if not self._settings.queue_threshold or self._core.policies.queue_boost_s(request) == inf:
            return False
        ticket.lane = lane_of(request)
        if ticket.lane in self.order.lanes or not self._capacity.has(request):
            return True
        lanes = self._batch.others(self.order.lanes)
        return any(self._lane_has_capacity(lane) for lane in lanes)

    def add(self, ticket: Ticket, now: float) -> SeqWait:
        """Let a ticket wait; returns the entry to publish. Raises RouteError."""
        ticket.waiting = self._entries.entry(ticket, now)
        self._own[ticket.request.request] = ticket
        return ticket.waiting

    def apply(self, event: SeqEvent) -> None:
        """A request waits in some router, or is placed there."""
        if type(event) is SeqWait:
            self._insert(event)
        elif type(event) is SeqAdd:
            self._remove(event.request, placed=True, events=[event])

    def drop(self, request: str) -> Ticket | None:
        ticket = self._own.pop(request, None)
        self.drop_entry(request)
        return ticket

    def drop_entry(self, request: str) -> None:
        """Forget what the stream said of a request; its ticket stays."""
        self._remove(request, placed=False)

    def placed(self, ticket: Ticket, events: Collection[SeqEvent]) -> None:
        """A ticket that was taken has been placed by these events, among others."""
        self._remove(ticket.request.request, placed=True, events=events)

    def update(self, ticket: Ticket, now: float) -> SeqWait | None:
        """The new entry of a ticket with new overlaps; None if its position stays."""
        if ticket.waiting is None or ticket.request.request not in self._own:
            return None
        try:
            entry = self._entries.entry(ticket, now)
        except Exception:
            return None  # the entry stays; placing it refuses it
        if entry.key == ticket.waiting.key:
            return None
        ticket.waiting = entry
        return entry

    def expire(self, now: float) -> None:
        """Insert own entries that do not arrive, drop those of others past their deadline."""
        for ticket in self._own.values():
            unseen = ticket.request.request not in self.order.entries
            if unseen and ticket.waiting is not None and ticket.scored_at < now - ECHO_PATIENCE_S:
                self._insert(ticket.waiting)
        late = now + self._core.epoch - LATE_S
        for entry in [e for e in self.order.entries.values() if e.deadline < late]:
            self._remove(entry.request, placed=False)

    def retain_routers(self, routers: Collection[str], now: float) -> None:
        """Drop the entries of replicas that are not among `routers`."""
        for router in [r for r in self._skipped_until if r not in routers]:
            del self._skipped_until[router]
        young = now + self._core.epoch - NEWCOMER_S
        for entry in list(self.order.entries.values()):
            known = entry.router == self._router or entry.router in routers
            if not known and entry.arrived < young:
                self._remove(entry.request, placed=False)

    def _insert(self, entry: SeqWait) -> None:
        if entry.router == self._router and entry.request not in self._own:
            return
        self.order.push(entry)
        self._capacity.note(entry)

    def _remove(self, request: str, placed: bool, events: Collection[SeqEvent] = ()) -> None:
        entry = self.order.remove(request, placed)
        if entry is None:
            return
        if entry.lane.startswith(BATCH):
            self._batch.placed(entry, events)
        if entry.lane not in self.order.lanes:
            self._capacity.forget(entry.lane)

    # turns

    def take_due(self, now: float) -> Iterator[Ticket]:
        """Take own tickets while they are first and have capacity, or are to be refused.

        The caller places each before it takes the next, and calls `placed` or `drop` for it.
        """
        lanes, blocked = self.order.lanes, set[str]()
        if len(lanes) > 1:
            blocked = {lane for lane in lanes if not self._lane_has_capacity(lane)}
        while not all(lane in blocked for lane in self.order.lanes):
            head = self.order.head(now + self._core.epoch, blocked)
            if head is None:
                return
            ticket = self._own.get(head.request)
            if ticket is None:
                if not self._passes_replica(head, blocked, now):
                    return
            elif not self._has_capacity(ticket.request):
                blocked.add(head.lane)
            else:
                del self._own[head.request]
                yield ticket

    def _has_capacity(self, request: RouteRequest) -> bool:
        """True for capacity, and for a request that is refused when it is placed."""
        try:
            return self._capacity.has(request)
        except Exception:
            return True

    def _lane_has_capacity(self, lane: str) -> bool:
        """True if a lane's requests have capacity, or will be refused and so need not wait."""
        try:
            return self._capacity.lane_has(lane)
        except Exception:
            return any(ticket.lane == lane for ticket in self._own.values())  # refused when placed

    def _passes_replica(self, head: SeqWait, blocked: set[str], now: float) -> bool:
        """False while another replica is to place the head, and that delays an own request.

        Without capacity, the head's lane is blocked. A replica that exceeds REPLICA_PATIENCE_S is
        skipped for SKIP_REPLICA_S and its entries are dropped here; if it was only slow, it still
        places its requests.
        """
        if not self._lane_has_capacity(head.lane):
            blocked.add(head.lane)
            if self._stalled is not None and self._stalled[0] == head.request:
                self._stalled = None
            return True
        own_lanes = {ticket.lane for ticket in self._own.values()}
        if not any(self._lane_has_capacity(lane) for lane in own_lanes):
            return False
        if now >= self._skipped_until.get(head.router, 0.0):
            if self._stalled is None or self._stalled[0] != head.request:
                self._stalled = head.request, now
            if now - self._stalled[1] < REPLICA_PATIENCE_S:
                return False
            self._skipped_until[head.router] = now + SKIP_REPLICA_S
        self._stalled = None
        for entry in [e for e in self.order.entries.values() if e.router == head.router]:
            self._remove(entry.request, placed=False)
        return True
