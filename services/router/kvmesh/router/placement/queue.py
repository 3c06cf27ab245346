"""Placement queue of one model, as synchronous code that service and simulator share.

Every replica holds the waiting requests of all replicas, from the active-sequence stream, so all
have the same order. A replica places only its own requests, each when it is first among those
with free capacity. The stream defines the order: a request enters the queue when its event
arrives on the stream.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Decision,
    Refused,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqWait,
)
from kvmesh.router.config import fair_weights
from kvmesh.router.errors import RouteError, RouterOverloaded
from kvmesh.router.placement.batch_lane import BatchLane
from kvmesh.router.placement.failure_log import FailureLog
from kvmesh.router.placement.fair_order import BATCH, FairOrder
from kvmesh.router.placement.free_capacity import FreeCapacity, lane_of
from kvmesh.router.placement.gathering import Gathering
from kvmesh.router.placement.held_prompts import HeldPrompt, HeldPrompts
from kvmesh.router.placement.prefix_waits import PrefixWaits
from kvmesh.router.placement.queue_entries import QueueEntries
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement.ticket import Ticket
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.router.state.arrays import Slots
from kvmesh.router.state.fair_classes import fair_class

REPLICA_PATIENCE_S = 0.25  # for the replica whose request is first to place it
SKIP_REPLICA_S = 5.0  # the queue does not wait for a replica that was too slow
ECHO_PATIENCE_S = 0.5  # for this replica's entry to arrive on the stream
NEWCOMER_S = 5.0  # for the card of a new replica to arrive
CLASSES_S = 300.0  # after a request of a fair class, the classes have to get their shares
ASK_AGAIN_S = 1e-4  # for each request but one that is not admitted: asking takes a part of it


@dataclass
class QueueActions:
    """Actions for the caller after a step.

    Events to publish, tickets with a result, and tickets that wait from now on.
    """

    events: list[SeqEvent] = field(default_factory=list)
    done: list[Ticket] = field(default_factory=list)
    parked: list[Ticket] = field(default_factory=list)


class PlacementQueue:
    """Places tickets together with those of the same instant if capacity is free, else in order.

    `router` is this instance.
    """

    def __init__(self, core: RouterCore, router: str) -> None:
        settings = core.settings
        self.core = core
        self._router = router
        self._settings = settings
        self._queue = FairOrder(
            settings.queue_quantum, fair_weights(settings), settings.starvation_s
        )
        self._batch = BatchLane(core)
        self._capacity = FreeCapacity(core, self._batch, self._queue)
        self._entries = QueueEntries(core, self._batch, router)
        self._prefix = PrefixWaits(core)
        self._gathers = settings.gather_s > 0 and settings.queue_threshold > 0
        self._gathering = Gathering(settings.gather_s)
        self._held = HeldPrompts(core.table, core.prefills)
        self._own: dict[str, Ticket] = {}
        self._unadmitted: dict[str, Ticket] = {}
        self._freed: list[SeqFree] = []  # of waits whose events may follow the first ones
        self._ask_again = 0.0
        self._classes_until = -inf
        self._stalled: tuple[str, float] | None = None
        self._skipped_until: dict[str, float] = {}
        self._failures = FailureLog()
        self._rate = 0.0
        self._rate_updated = 0.0

    @property
    def waiting(self) -> int:
        """Number of requests that wait in any replica's queue, or here for another reason.

        Those freed during a wait count until they are freed again.
        """
        here = len(self._unadmitted) + len(self._gathering) + len(self._held) + len(self._prefix)
        return len(self._queue) + here + len(self._freed)

    @property
    def gathering(self) -> bool:
        """True while requests wait for others of the same instant."""
        return len(self._gathering) > 0

    @property
    def own_tickets(self) -> list[Ticket]:
        """Tickets of this replica that wait for capacity, admission or a prefix."""
        return [*self._own.values(), *self._unadmitted.values(), *self._prefix.tickets]

    @property
    def waiting_tokens(self) -> int:
        return sum(entry.cost for entry in self._queue.entries.values()) + self._held.tokens

    # actions

    def submit(self, ticket: Ticket, now: float) -> QueueActions:
        """Place a request, queue it, or refuse it.

        A request that is `gathering` afterwards is placed by `place_gathered`.
        """
        ticket.scored_at = now
        actions = QueueActions()
        try:
            if not self._admits(ticket.request, now):
                self._park(ticket, actions)
            elif self._gathers and self._may_wait(ticket.request):
                if fair_class(ticket.request.hints):
                    self._classes_until = now + CLASSES_S
                self._gathering.add(ticket, now)
                if self._gathering.complete(now):
                    self._place_gathered(now, actions)
            elif self._must_wait(ticket):
                self._enqueue(ticket, now, actions)
            else:
                self._place(ticket, now, actions)
        except Exception as error:
            _finish(ticket, self._refusal(ticket, error), actions)
        return actions

    def place_gathered(self, now: float) -> QueueActions:
        """Place the requests that were gathered."""
        actions = QueueActions()
        self._place_gathered(now, actions)
        return actions

    def apply(self, event: SeqEvent, now: float) -> None:
        """Apply an event of the active-sequence stream, of this router or a replica."""
        if type(event) is SeqWait:
            self._insert(event)
            return
        if type(event) is SeqFree:
            self._remove(event.request, placed=False)
        elif type(event) is SeqAdd:
            self._remove(event.request, placed=True, events=[event])
        if self.core.ends_prefill(event):
            self._prefix.on_computed(event.request)
        if type(event) is SeqPrefilled or type(event) is SeqFree:
            self._held.computed(event.request)
        self._batch.apply(event)
        self.core.apply(event, now)

    def place_ready(self, now: float) -> QueueActions:
        """Place the waiting requests with free capacity; call when load may have fallen."""
        actions = QueueActions()
        actions.events += self._freed
        self._freed.clear()
        if self._prefix:
            self._place_after_prefixes(now, actions)
        if self._gathering.complete(now):
            self._place_gathered(now, actions)
        if self._held:
            self._send_held(now, actions)
        if self._unadmitted and now >= self._ask_again:
            self._submit_admitted(now, actions)
        lanes = self._queue.lanes
        blocked = (
            {lane for lane in lanes if not self._lane_has_capacity(lane)}
            if len(lanes) > 1
            else set()
        )
        while not all(lane in blocked for lane in lanes):
            head = self._queue.head(now + self.core.epoch, blocked)
            if head is None or not self._advance(head, blocked, now, actions):
                break
        return actions

    def cancel(self, request: str) -> QueueActions:
        """Drop a waiting request."""
        actions = QueueActions()
        ticket = (
            self._own.pop(request, None)
            or self._unadmitted.pop(request, None)
            or self._prefix.drop(request)
            or self._gathering.remove(request)
            or self._held.cancel(request)
        )
        if ticket is not None:
            self._remove(request, placed=False)
            actions.events.append(SeqFree(request))
        return actions

    def expire(self, now: float) -> QueueActions:
        """Refuse own requests past their deadline; drop those of other replicas."""
        actions = QueueActions()
        self._held.forget_lost(self.core.active)
        for ticket in list(self._own.values()):
            unseen = ticket.request.request not in self._queue.entries
            if unseen and ticket.waiting is not None and ticket.scored_at < now - ECHO_PATIENCE_S:
                self._insert(ticket.waiting)
        for ticket in self.own_tickets:
            if ticket.deadline <= now:
                actions.events += self.cancel(ticket.request.request).events
                waited = now - ticket.arrived
                reason = f"no placement within {waited:.1f} s"
                retry_after = self.retry_after()
                _finish(
                    ticket,
                    Refused(code="deadline", reason=reason, retry_after_s=retry_after),
                    actions,
                )
        late = now + self.core.epoch - 5.0
        for entry in [e for e in self._queue.entries.values() if e.deadline < late]:
            self._remove(entry.request, placed=False)
        return actions

    def retain_routers(self, routers: Collection[str], now: float) -> None:
        """Drop the waiting requests of replicas that are not among `routers`."""
        for router in [r for r in self._skipped_until if r not in routers]:
            del self._skipped_until[router]
        young = now + self.core.epoch - NEWCOMER_S
        for entry in list(self._queue.entries.values()):
            known = entry.router == self._router or entry.router in routers
            if not known and entry.arrived < young:
                self._remove(entry.request, placed=False)

    def due_for_rescore(self, now: float) -> list[Ticket]:
        """Own waiting tickets whose overlaps are older than `rescore_s`."""
        oldest = now - self._settings.rescore_s
        return [t for t in self.own_tickets if t.scored_at < oldest and t.request.sequence_hashes]

    def rescore(self, ticket: Ticket, overlaps: Overlaps | None, now: float) -> QueueActions:
        """Update a waiting ticket's overlaps, and its queue entry if its key changes."""
        actions = QueueActions()
        ticket.overlaps, ticket.scored_at = overlaps, now
        if ticket.waiting is not None and ticket.request.request in self._own:
            try:
                entry = self._entries.entry(ticket, now)
            except Exception:
                return actions  # the entry stays; placing it refuses it
            if entry.key != ticket.waiting.key:
                ticket.waiting = entry
                actions.events.append(entry)
        return actions

    def retry_after(self) -> float:
        """Expected seconds until the queue is empty, at the present rate; 1 to 60."""
        if self._rate <= 0:
            return 1.0
        return min(max(self.waiting_tokens / self._rate, 1.0), 60.0)

    # placing

    def _place(self, ticket: Ticket, now: float, actions: QueueActions) -> None:
        request = ticket.request
        slots = self._batch.room(request) if self._batch.includes(request) else None
        decision = self._decide(ticket, now, slots)
        if slots is None and self._waits_for_prefix(ticket, decision, now, actions):
            actions.parked.append(ticket)
            return
        self._update_rate(decision, now)
        actions.events += self.core.commit(decision, now)
        _finish(ticket, decision, actions)

    def _place_after_prefixes(self, now: float, actions: QueueActions) -> None:
        """Place the requests whose wait for a prefix is over."""
        for ticket in self._prefix.end_due(now):
            try:
                self._place(ticket, now, actions)
            except Exception as error:
                actions.events.append(SeqFree(ticket.request.request))
                _finish(ticket, self._refusal(ticket, error), actions)

    def _decide(self, ticket: Ticket, now: float, slots: Slots | None = None) -> Decision:
        return self.core.decide(
            ticket.request,
            ticket.overlaps,
            now,
            ticket.arrived,
            ticket.index_s,
            ticket.note,
            slots,
            ticket.prefix_waits,
        )

    def _waits_for_prefix(
        self, ticket: Ticket, decision: Decision, now: float, actions: QueueActions
    ) -> bool:
        """Let a request wait if its rank computes its prefix for another one; False if not."""
        settings = self._settings
        if not settings.await_prefixes or len(self._prefix) >= settings.queue_limit:
            return False
        events = self._prefix.begin(ticket, decision, now)
        actions.events += events
        return len(events) > 0

    def _place_gathered(self, now: float, actions: QueueActions) -> None:
        """Place the gathered requests, and send those whose turn it is on their rank.

        Where requests have fair classes, each counts for the capacity that the next one finds: a
        burst does not pass the queue, which gives every class its share.
        """
        tickets = self._gathering.take()
        classes = now < self._classes_until
        if not classes:
            tickets = [ticket for ticket in tickets if not self._queued(ticket, now, actions)]
        for ticket in tickets:
            if not classes or not self._queued(ticket, now, actions):
                self._place_or_hold(ticket, now, actions, alone=len(tickets) == 1)
        if self._held:
            self._send_held(now, actions)
        actions.parked += [t for t in tickets if t.result is None and t.waiting is None]

    def _queued(self, ticket: Ticket, now: float, actions: QueueActions) -> bool:
        """Queue or refuse a request that must wait for capacity; False if it need not."""
        try:
            if not self._must_wait(ticket):
                return False
            self._enqueue(ticket, now, actions)
        except Exception as error:
            _finish(ticket, self._refusal(ticket, error), actions)
        return True

    def _place_or_hold(
        self, ticket: Ticket, now: float, actions: QueueActions, alone: bool = False
    ) -> None:
        """Place a request; the router keeps it until its turn on its rank.

        One that was gathered alone is sent at once if its rank has no prompt to compute, and so is
        one for a prefill worker, whose end the router learns only after the handoff.
        """
        try:
            if len(self._held) >= self._settings.queue_limit:
                self._place(ticket, now, actions)
                return
            decision = self._decide(ticket, now)
            if self._waits_for_prefix(ticket, decision, now, actions):
                return
            self._update_rate(decision, now)
            events = self.core.commit(decision, now)
            apart = decision.prefill is not None
            idle = alone and not decision.chosen.prefill
            if apart or self._held.note_loading(decision) or idle:
                actions.events += events
                _finish(ticket, decision, actions)
                return
            key = self._entries.sort_key(ticket.request, ticket.queued_since, decision.tokens)
            self._held.add(ticket, decision, events, key, self._entries.tier(ticket.request), now)
        except Exception as error:
            _finish(ticket, self._refusal(ticket, error), actions)

    def _send_held(self, now: float, actions: QueueActions) -> None:
        lost: list[Ticket] = []
        for prompt in self._held.take_ready(now):
            if self._held.is_served(prompt):
                self._send(prompt, now, actions)
            else:
                self.core.apply(SeqFree(prompt.ticket.request.request), now)
                lost.append(prompt.ticket)
        for ticket in lost:
            if not self._queued(ticket, now, actions):
                self._place_or_hold(ticket, now, actions)

    def _send(self, prompt: HeldPrompt, now: float, actions: QueueActions) -> None:
        decision, time = prompt.decision, now + self.core.epoch
        if time > decision.time:
            waited = decision.wait_s + time - decision.time
            decision = replace(decision, time=time, wait_s=waited)
        actions.events += prompt.events
        _finish(prompt.ticket, decision, actions)

    def _update_rate(self, decision: Decision, now: float) -> None:
        """Update the rate of placed uncached tokens per second, smoothed over about 10 s."""
        cached = sum(decision.chosen.overlap) * self.core.table.block_size
        share = min((now - self._rate_updated) / 10.0, 1.0)
        if share > 0:
            self._rate *= 1 - share
            self._rate_updated = now
        self._rate += max(decision.tokens - cached, 0) / 10.0

    def _may_wait(self, request: RouteRequest) -> bool:
        """False for batch requests, which have their own order, and for agents past their wait."""
        return not (
            self._batch.includes(request) or self.core.policies.queue_boost_s(request) == inf
        )

    def _must_wait(self, ticket: Ticket) -> bool:
        if self._batch.includes(ticket.request):
            ticket.lane = BATCH + lane_of(ticket.request)
            return True
        if (
            not self._settings.queue_threshold
            or self.core.policies.queue_boost_s(ticket.request) == inf
        ):
            return False
        ticket.lane = lane_of(ticket.request)
        if ticket.lane in self._queue.lanes or not self._capacity.has(ticket.request):
            return True
        lanes = self._batch.others(self._queue.lanes)
        return any(self._lane_has_capacity(lane) for lane in lanes)

    def _refusal(self, ticket: Ticket, error: Exception) -> Refused:
        """The refusal for an error; an internal error fails one request, not the router."""
        if isinstance(error, RouteError):
            return error.refusal
        text = f"request {ticket.request.request} could not be routed"
        self._failures.note("routing", text, error)
        reason = f"the router failed ({type(error).__name__}); see its log"
        return Refused(code="unavailable", reason=reason)

    # waiting

    def _admits(self, request: RouteRequest, now: float) -> bool:
        return self._batch.includes(request) or self.core.policies.admits(request, now)

    def _park(self, ticket: Ticket, actions: QueueActions) -> None:
        self._check_limit(ticket)
        self._unadmitted[ticket.request.request] = ticket
        actions.parked.append(ticket)

    def _submit_admitted(self, now: float, actions: QueueActions) -> None:
        """Submit the requests that are admitted now; they have waited enough to be gathered."""
        self._ask_again = now + ASK_AGAIN_S * (len(self._unadmitted) - 1)
        for name, ticket in list(self._unadmitted.items()):
            if self._admits(ticket.request, now):
                del self._unadmitted[name]
                admitted = self.submit(ticket, now)
                actions.events += admitted.events
                actions.done += admitted.done
                actions.parked += admitted.parked
        if self._gathering:
            self._place_gathered(now, actions)

    def _enqueue(self, ticket: Ticket, now: float, actions: QueueActions) -> None:
        self._check_limit(ticket)
        ticket.waiting = self._entries.entry(ticket, now)
        self._own[ticket.request.request] = ticket
        actions.events.append(ticket.waiting)
        actions.parked.append(ticket)

    def _check_limit(self, ticket: Ticket) -> None:
        """Raise RouterOverloaded if the queue is full, unless the request was queued before."""
        batch = self._batch.includes(ticket.request)
        waiting = self._queue.size(batch) + (0 if batch else len(self._unadmitted))
        if ticket.request.arrived is None and waiting + 1 > self._settings.queue_limit:
            retry_after = self.retry_after()
            raise RouterOverloaded(
                f"{self._settings.queue_limit} requests wait already", retry_after
            )

    def _insert(self, entry: SeqWait) -> None:
        if entry.router == self._router and entry.request not in self._own:
            return
        self._queue.push(entry)
        self._capacity.note(entry)

    def _remove(self, request: str, placed: bool, events: Collection[SeqEvent] = ()) -> None:
        entry = self._queue.remove(request, placed)
        if entry is not None and entry.lane.startswith(BATCH):
            self._batch.placed(entry, events)
        if entry is not None and entry.lane not in self._queue.lanes:
            self._capacity.forget(entry.lane)
        if not placed:
            self._own.pop(request, None)
            self._unadmitted.pop(request, None)
            if self._prefix.drop(request) is not None:
                self._freed.append(SeqFree(request))
            self._held.remove(request)
            self._gathering.remove(request)

    def _lane_has_capacity(self, lane: str) -> bool:
        """True if a lane's requests have capacity, or will be refused and so need not wait."""
        try:
            return self._capacity.lane_has(lane)
        except Exception:
            return any(ticket.lane == lane for ticket in self._own.values())  # refused when placed

    def _advance(self, head: SeqWait, blocked: set[str], now: float, actions: QueueActions) -> bool:
        """Place the queue's head if it is this router's and has capacity, else block its lane.

        Returns False if another replica has to place it.
        """
        ticket = self._own.get(head.request)
        if ticket is None:
            return self._await_replica(head, blocked, now)
        try:
            if not self._capacity.has(ticket.request):
                blocked.add(head.lane)
                return True
            self._place(ticket, now, actions)
        except Exception as error:
            actions.events.append(SeqFree(ticket.request.request))
            _finish(ticket, self._refusal(ticket, error), actions)
        self._own.pop(ticket.request.request, None)
        placed = isinstance(ticket.result, Decision) or ticket.request.request in self._prefix
        self._remove(ticket.request.request, placed, actions.events if placed else ())
        return True

    def _await_replica(self, head: SeqWait, blocked: set[str], now: float) -> bool:
        """Wait for another replica to place the head, if that delays a request of this router.

        A replica that exceeds REPLICA_PATIENCE_S is skipped for SKIP_REPLICA_S and its entries are
        dropped here; if it was only slow, it still places its requests.
        """
        if not self._lane_has_capacity(head.lane):
            blocked.add(head.lane)
            if self._stalled is not None and self._stalled[0] == head.request:
                self._stalled = None
            return True
        if not any(
            self._lane_has_capacity(lane) for lane in {ticket.lane for ticket in self._own.values()}
        ):
            return False
        if now >= self._skipped_until.get(head.router, 0.0):
            if self._stalled is None or self._stalled[0] != head.request:
                self._stalled = head.request, now
            if now - self._stalled[1] < REPLICA_PATIENCE_S:
                return False
            self._skipped_until[head.router] = now + SKIP_REPLICA_S
        self._stalled = None
        for entry in [e for e in self._queue.entries.values() if e.router == head.router]:
            self._remove(entry.request, placed=False)
        return True


def _finish(ticket: Ticket, result: Decision | Refused, actions: QueueActions) -> None:
    ticket.result = result
    actions.done.append(ticket)
