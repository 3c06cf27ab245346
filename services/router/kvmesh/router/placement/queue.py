"""Who may go now and who waits: the queue of one model, as plain synchronous code.

Every replica holds the waiting requests of all replicas, learned from the active-sequence stream,
so all see the same order; a replica places only its own, each when it is first of all that there
is room for. The stream is the order: a request takes its place when its own event comes back.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf

import msgspec
import numpy as np
from msgspec.structs import replace

from kvmesh.bus.messages import Decision, Refused, RouteRequest, SeqAdd, SeqEvent, SeqFree, SeqWait
from kvmesh.router.config import fair_weights
from kvmesh.router.errors import RouteError, RouterOverloaded
from kvmesh.router.placement.failure_log import FailureLog
from kvmesh.router.placement.fair_order import FairOrder, fair_class
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement.ticket import Ticket
from kvmesh.router.scoring.overlaps import Overlaps

FOREIGN_PATIENCE_S = 0.25  # for the replica whose turn it is to move
PASSED_OVER_S = 5.0  # in which a replica that has lost its patience is not waited for again
ECHO_PATIENCE_S = 0.5  # for one's own entry to come back from the stream
NEWCOMER_S = 5.0  # until the card of a new replica must have been seen
_ENCODE = msgspec.msgpack.Encoder().encode


@dataclass
class QueueActions:
    """What the shell must do after a step: publish events and answer tickets."""

    events: list[SeqEvent] = field(default_factory=list)
    done: list[Ticket] = field(default_factory=list)


class PlacementQueue:
    """Places tickets at once where there is room, else in order. `router` is the own instance."""

    def __init__(self, core: RouterCore, router: str) -> None:
        settings = core.settings
        self.core = core
        self._router = router
        self._settings = settings
        self._queue = FairOrder(
            settings.queue_quantum, fair_weights(settings), settings.starvation_s
        )
        self._constraints: dict[str, RouteRequest] = {"": _ANY}
        self._own: dict[str, Ticket] = {}
        self._held: dict[str, Ticket] = {}
        self._stalled: tuple[str, float] | None = None
        self._passed_over: dict[str, float] = {}
        self._failures = FailureLog()
        self._rate = 0.0
        self._rated = 0.0
        self._roomy = np.zeros(0, np.int64), 0  # where room was found last, among which slots

    @property
    def waiting(self) -> int:
        """Requests that wait here and in the other replicas."""
        return len(self._queue) + len(self._held)

    @property
    def own(self) -> list[Ticket]:
        return [*self._own.values(), *self._held.values()]

    @property
    def waiting_tokens(self) -> int:
        return sum(entry.cost for entry in self._queue.entries.values())

    # steps

    def submit(self, ticket: Ticket, now: float) -> QueueActions:
        """Take in a request: place it, let it wait, or refuse it."""
        ticket.scored = now
        steps = QueueActions()
        try:
            if not self.core.admits(ticket.request, now):
                self._hold(ticket)
            elif self._must_wait(ticket):
                self._park(ticket, now, steps)
            else:
                self._place(ticket, now, steps)
        except Exception as error:
            _finish(ticket, self._refusal(ticket, error), steps)
        return steps

    def apply(self, event: SeqEvent, now: float) -> None:
        """Apply an event of the active-sequence stream, one's own or that of a replica."""
        if type(event) is SeqWait:
            self._enter(event)
            return
        if type(event) is SeqFree:
            self._leave(event.request, placed=False)
        elif type(event) is SeqAdd:
            self._leave(event.request, placed=True)
        self.core.apply(event, now)

    def pump(self, now: float) -> QueueActions:
        """Place whoever can go now; call when load may have fallen."""
        steps = QueueActions()
        if self._held:
            self._admit(now, steps)
        lanes = self._queue.lanes
        blocked = {lane for lane in lanes if not self._open(lane)} if len(lanes) > 1 else set()
        while not all(lane in blocked for lane in lanes):
            head = self._queue.head(now + self.core.epoch, blocked)
            if head is None or not self._release(head, blocked, now, steps):
                break
        return steps

    def cancel(self, request: str) -> QueueActions:
        """Its sender does not want a placement any more."""
        steps = QueueActions()
        ticket = self._own.pop(request, None) or self._held.pop(request, None)
        if ticket is not None:
            self._leave(request, placed=False)
            steps.events.append(SeqFree(request))
        return steps

    def expire(self, now: float) -> QueueActions:
        """Refuse the own requests whose deadline has passed; drop those of others."""
        steps = QueueActions()
        for ticket in list(self._own.values()):
            unseen = ticket.request.request not in self._queue.entries
            if unseen and ticket.waiting is not None and ticket.scored < now - ECHO_PATIENCE_S:
                self._enter(ticket.waiting)
        for ticket in self.own:
            if ticket.deadline <= now:
                steps.events += self.cancel(ticket.request.request).events
                waited = now - ticket.arrived
                reason = f"no placement within {waited:.1f} s"
                after = self.retry_after()
                _finish(ticket, Refused(code="deadline", reason=reason, retry_after_s=after), steps)
        late = now + self.core.epoch - 5.0
        for entry in [e for e in self._queue.entries.values() if e.deadline < late]:
            self._leave(entry.request, placed=False)
        return steps

    def keep(self, routers: Collection[str], now: float) -> None:
        """Only these replicas are there: what waited in others waits no more."""
        for router in [r for r in self._passed_over if r not in routers]:
            del self._passed_over[router]
        young = now + self.core.epoch - NEWCOMER_S
        for entry in list(self._queue.entries.values()):
            known = entry.router == self._router or entry.router in routers
            if not known and entry.arrived < young:
                self._leave(entry.request, placed=False)

    def stale(self, now: float) -> list[Ticket]:
        """Own waiting tickets whose overlaps should be asked anew."""
        oldest = now - self._settings.rescore_s
        return [t for t in self.own if t.scored < oldest and t.request.sequence_hashes]

    def rescore(self, ticket: Ticket, overlaps: Overlaps | None, now: float) -> QueueActions:
        """Take new overlaps of a waiting ticket, and its new place in the queue if that differs."""
        steps = QueueActions()
        ticket.overlaps, ticket.scored = overlaps, now
        if ticket.waiting is not None and ticket.request.request in self._own:
            try:
                entry = self._entry(ticket, now)
            except Exception:
                return steps  # it keeps its place, where it is to be refused
            if entry.key != ticket.waiting.key:
                ticket.waiting = entry
                steps.events.append(entry)
        return steps

    def retry_after(self) -> float:
        """Seconds in which what waits now should have gone, at the present rate; 1 to 60."""
        if self._rate <= 0:
            return 1.0
        return min(max(self.waiting_tokens / self._rate, 1.0), 60.0)

    # placing

    def _place(self, ticket: Ticket, now: float, steps: QueueActions) -> None:
        decision = self.core.decide(
            ticket.request, ticket.overlaps, now, ticket.arrived, ticket.index_s, ticket.note
        )
        steps.events += self.core.commit(decision, now)
        self._rate_placed(decision, now)
        _finish(ticket, decision, steps)

    def _rate_placed(self, decision: Decision, now: float) -> None:
        """Tokens per second that go out, smoothed over about 10 s."""
        held = sum(decision.chosen.overlap) * self.core.table.block_size
        share = min((now - self._rated) / 10.0, 1.0)
        if share > 0:
            self._rate *= 1 - share
            self._rated = now
        self._rate += max(decision.tokens - held, 0) / 10.0

    def _must_wait(self, ticket: Ticket) -> bool:
        if not self._settings.queue_threshold or self.core.shift(ticket.request) == inf:
            return False
        ticket.lane = _lane(ticket.request)
        if ticket.lane in self._queue.lanes or not self._room(ticket.request):
            return True
        return any(self._open(lane) for lane in self._queue.lanes)

    def _room(self, request: RouteRequest) -> bool:
        """Whether some eligible rank is below the threshold of active prefill."""
        slots = self.core.eligible(request)
        of, slot = self._roomy
        if of is slots and self._has_room_at(slot):
            return True
        table = self.core.table
        limit = self._settings.queue_threshold * table.step_tokens.take(slots)
        free = ((table.loads(slots)[0] <= limit) | (limit == 0)).nonzero()[0]
        if not len(free):
            return False
        self._roomy = slots, int(slots[free[0]])
        return True

    def _has_room_at(self, slot: int) -> bool:
        cells = self.core.table.cells
        limit = self._settings.queue_threshold * cells.step_tokens[slot]
        waiting = cells.prefill_tokens[slot] + cells.foreign_tokens[slot]
        return max(waiting, 0.0) <= limit or not limit

    def _refusal(self, ticket: Ticket, error: Exception) -> Refused:
        """What the sender is told; a defect costs one request, not the router."""
        if isinstance(error, RouteError):
            return error.refusal
        text = f"request {ticket.request.request} could not be routed"
        self._failures.note("routing", text, error)
        reason = f"the router failed ({type(error).__name__}); see its log"
        return Refused(code="unavailable", reason=reason)

    # waiting

    def _hold(self, ticket: Ticket) -> None:
        self._bound(ticket)
        self._held[ticket.request.request] = ticket

    def _admit(self, now: float, steps: QueueActions) -> None:
        for name, ticket in list(self._held.items()):
            if self.core.admits(ticket.request, now):
                del self._held[name]
                admitted = self.submit(ticket, now)
                steps.events += admitted.events
                steps.done += admitted.done

    def _park(self, ticket: Ticket, now: float, steps: QueueActions) -> None:
        self._bound(ticket)
        ticket.waiting = self._entry(ticket, now)
        self._own[ticket.request.request] = ticket
        steps.events.append(ticket.waiting)

    def _bound(self, ticket: Ticket) -> None:
        """Refuse what is one too many; not what has had a place before."""
        if ticket.request.arrived is None and self.waiting + 1 > self._settings.queue_limit:
            after = self.retry_after()
            raise RouterOverloaded(f"{self._settings.queue_limit} requests wait already", after)

    def _entry(self, ticket: Ticket, now: float) -> SeqWait:
        request, epoch = ticket.request, self.core.epoch
        view = self.core.view(request, ticket.overlaps, now)
        held = int(view.overlap.sum(1).max()) * self.core.table.block_size
        uncached = max(request.tokens - held, 1)
        arrived = ticket.place + epoch
        return SeqWait(
            request=request.request,
            router=self._router,
            lane=ticket.lane,
            tier=max(request.hints.strict_priority, 0),
            fair_class=fair_class(request.hints),
            key=self._key(request, arrived, uncached),
            cost=uncached,
            arrived=arrived,
            deadline=ticket.deadline + epoch,
            placement=request.placement if ticket.lane else None,
            adapter=request.adapter,
        )

    def _key(self, request: RouteRequest, arrived: float, uncached: int) -> float:
        settings, hints = self._settings, request.hints
        priority = max(hints.priority, 0)
        if settings.queue_order == "wspt":
            return -(1 + priority) / uncached
        if settings.queue_order == "lcfs":
            return -arrived
        shift = priority * settings.priority_shift_s
        shift += min(max(hints.latency_sensitivity, 0.0), 1.0) * settings.latency_shift_s
        return arrived - shift - self.core.shift(request)

    def _enter(self, entry: SeqWait) -> None:
        if entry.router == self._router and entry.request not in self._own:
            return
        self._queue.push(entry)
        if entry.placement is not None and entry.lane not in self._constraints:
            self._constraints[entry.lane] = replace(
                _ANY, placement=entry.placement, adapter=entry.adapter
            )

    def _leave(self, request: str, placed: bool) -> None:
        entry = self._queue.remove(request, placed)
        if entry is not None and entry.lane and entry.lane not in self._queue.lanes:
            self._constraints.pop(entry.lane, None)
        if not placed:
            self._own.pop(request, None)
            self._held.pop(request, None)

    def _open(self, lane: str) -> bool:
        """Whether there is room for the requests of a lane, or no reason for one's own to wait."""
        constraints = self._constraints.get(lane)
        if constraints is None:
            return False  # of a replica that does not tell them
        try:
            return self._room(constraints)
        except Exception:
            return any(ticket.lane == lane for ticket in self._own.values())  # it is to be refused

    def _release(self, head: SeqWait, blocked: set[str], now: float, steps: QueueActions) -> bool:
        """Place the first in the queue if it is one's own and there is room, or block its lane.

        False if it is for another replica to place it.
        """
        ticket = self._own.get(head.request)
        if ticket is None:
            return self._await(head, blocked, now)
        try:
            if not self._room(ticket.request):
                blocked.add(head.lane)
                return True
            self._place(ticket, now, steps)
        except Exception as error:
            steps.events.append(SeqFree(ticket.request.request))
            _finish(ticket, self._refusal(ticket, error), steps)
        self._own.pop(ticket.request.request, None)
        self._leave(ticket.request.request, placed=isinstance(ticket.result, Decision))
        return True

    def _await(self, head: SeqWait, blocked: set[str], now: float) -> bool:
        """Let the replica move whose turn it is, if there is room and somebody here waits for it.

        One that does not move in time is forgotten with all that waits there, and is not waited for
        again soon. If it was only slow, it will place its requests all the same.
        """
        if not self._open(head.lane):
            blocked.add(head.lane)
            if self._stalled is not None and self._stalled[0] == head.request:
                self._stalled = None
            return True
        if not any(self._open(lane) for lane in {ticket.lane for ticket in self._own.values()}):
            return False
        if now >= self._passed_over.get(head.router, 0.0):
            if self._stalled is None or self._stalled[0] != head.request:
                self._stalled = head.request, now
            if now - self._stalled[1] < FOREIGN_PATIENCE_S:
                return False
            self._passed_over[head.router] = now + PASSED_OVER_S
        self._stalled = None
        for entry in [e for e in self._queue.entries.values() if e.router == head.router]:
            self._leave(entry.request, placed=False)
        return True


def _finish(ticket: Ticket, result: Decision | Refused, steps: QueueActions) -> None:
    ticket.result = result
    steps.done.append(ticket)


def _lane(request: RouteRequest) -> str:
    """Requests that may run on the same workers wait for each other."""
    if request.placement == _ANY.placement and request.adapter is None:
        return ""
    constraints = _ENCODE((request.placement, request.adapter))
    return blake2b(constraints, digest_size=8).hexdigest()


_ANY = RouteRequest(request="", model="", sequence_hashes=b"", tokens=0, max_tokens=0, deadline_s=0)
