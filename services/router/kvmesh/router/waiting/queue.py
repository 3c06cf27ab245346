"""Placement queue of one model, as synchronous code that service and simulator share.

A request waits in up to six ways, each of which is a `Wait`: while its agent rests, until a worker
has loaded its adapter, with those of the same instant, in the common queue of all routers, while
another request computes its prefix, and for the turn of its prompt on its rank. This module passes
it from one to the next.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Decision,
    Refused,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqProgress,
)
from kvmesh.router.errors import NoWorkers, RouteError, RouterOverloaded
from kvmesh.router.placement.adapter_loads import AdapterLoad
from kvmesh.router.placement.failure_log import FailureLog
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.router.state.arrays import Slots
from kvmesh.router.state.fair_classes import fair_class
from kvmesh.router.waiting.adapter_waits import AdapterWaits
from kvmesh.router.waiting.batch_lane import BatchLane
from kvmesh.router.waiting.common_queue import CommonQueue
from kvmesh.router.waiting.gathering import Gathering
from kvmesh.router.waiting.held_prompts import HeldPrompt, HeldPrompts
from kvmesh.router.waiting.placement_rate import PlacementRate
from kvmesh.router.waiting.prefix_waits import PrefixWaits
from kvmesh.router.waiting.queue_entries import QueueEntries
from kvmesh.router.waiting.resting import Resting
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.router.waiting.wait import Wait

CLASSES_S = 300.0  # after a request of a fair class, the classes have to get their shares


@dataclass
class QueueActions:
    """Actions for the caller after a step.

    Events to publish, tickets with a result, tickets that wait from now on, and adapters to load.
    """

    events: list[SeqEvent] = field(default_factory=list)
    done: list[Ticket] = field(default_factory=list)
    parked: list[Ticket] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)

    def finish(self, ticket: Ticket, result: Decision | Refused) -> None:
        ticket.result = result
        self.done.append(ticket)


class PlacementQueue:
    """Places tickets together with those of the same instant if capacity is free, else in order.

    `router` is this instance.
    """

    def __init__(self, core: RouterCore, router: str) -> None:
        settings = core.settings
        self.core = core
        self._settings = settings
        self._gathers = settings.gather_s > 0 and settings.queue_threshold > 0
        self._batch = BatchLane(core)
        self._entries = QueueEntries(core, self._batch, router)
        self._resting = Resting(core.policies)
        self._adapters = AdapterWaits(core)
        self._gathered = Gathering(settings.gather_s)
        self.common = CommonQueue(core, self._batch, self._entries, router)
        self._prefix = PrefixWaits(core)
        self._held = HeldPrompts(core.table, core.prefills, core.speeds)
        self._waits: tuple[Wait[object], ...] = (
            self._resting,
            self._adapters,
            self._gathered,
            self.common,
            self._prefix,
            self._held,
        )
        self._freed: list[SeqFree] = []  # of waits whose events may follow the first ones
        self._classes_until = -inf
        self._failures = FailureLog()
        self._rate = PlacementRate()

    @property
    def waiting(self) -> int:
        """Number of requests that wait in any replica's queue, or here for another reason.

        Those freed during a wait count until they are freed again.
        """
        return sum([len(wait) for wait in self._waits]) + len(self._freed)

    @property
    def is_empty(self) -> bool:
        """True if nothing is `waiting`."""
        return not (self._freed or any(map(len, self._waits)))

    @property
    def gathering(self) -> bool:
        """True while requests wait for others of the same instant."""
        return len(self._gathered) > 0

    @property
    def own_tickets(self) -> list[Ticket]:
        """Tickets of this replica that wait for capacity, admission, an adapter or a prefix."""
        waits: tuple[Wait[object], ...] = (
            *(self.common, self._resting, self._adapters, self._prefix),
        )
        return [ticket for wait in waits for ticket in wait.tickets]

    @property
    def waiting_tokens(self) -> int:
        return self.common.tokens + self._held.tokens

    # actions

    def submit(self, ticket: Ticket, now: float) -> QueueActions:
        """Place a request, queue it, or refuse it.

        A request that is `gathering` afterwards is placed by `place_gathered`.
        """
        actions = QueueActions()
        request = ticket.request
        if request.adapter is not None and request.prefetch is None:
            self.core.adapters.note(request.adapter, request.placement, now)
        self._submit(ticket, now, actions)
        return actions

    def place_gathered(self, now: float) -> QueueActions:
        """Place the requests that were gathered."""
        actions = QueueActions()
        self._place_together(self._gathered.take(), now, actions)
        return actions

    def apply(self, event: SeqEvent, now: float, own: bool = False) -> None:
        """Apply an event of the active-sequence stream; `own`: this router has published it."""
        if type(event) is SeqProgress:  # no wait depends on it
            self.core.apply(event, now)
            return
        if type(event) is SeqFree:
            if own and any(event.request in wait for wait in self._waits):
                self._end_earlier(event, now)
                return
            self._forget(event)
        self.common.apply(event)
        self._prefix.apply(event)
        self._held.apply(event)
        self._batch.apply(event, now)
        self.core.apply(event, now)

    def _end_earlier(self, event: SeqFree, now: float) -> None:
        """An end that this router published of a request that has been sent again meanwhile.

        It was applied here before. The later request keeps its place, and its load if it has one.
        """
        self.common.drop_entry(event.request)
        if event.request not in self._held and event.request not in self._prefix:
            self.core.apply(event, now)

    def _forget(self, event: SeqFree) -> None:
        if event.request in self._prefix:
            self._freed.append(event)
        for wait in self._waits:
            wait.drop(event.request)

    def place_ready(self, now: float) -> QueueActions:
        """Place the waiting requests with free capacity; call when load may have fallen."""
        actions = QueueActions()
        actions.events += self._freed
        self._freed.clear()
        for ticket in self._prefix.take_due(now):
            self._place_or_refuse(ticket, now, actions)
        self._place_due(now, actions)
        self._send_held(now, actions)
        admitted = False
        for ticket in chain(self._adapters.take_due(now), self._resting.take_due(now)):
            self._submit(ticket, now, actions)
            admitted = True
        if admitted:  # they have waited enough
            self._place_together(self._gathered.take(), now, actions)
        for ticket in self.common.take_due(now):
            if self._place_or_refuse(ticket, now, actions):
                self.common.placed(ticket, actions.events)
            else:
                self.common.drop(ticket.request.request)
        return actions

    def cancel(self, request: str) -> QueueActions:
        """Drop a waiting request."""
        actions = QueueActions()
        dropped = [wait.drop(request) for wait in self._waits]
        if any(dropped):
            actions.events.append(SeqFree(request))
        return actions

    def expire(self, now: float) -> QueueActions:
        """Refuse own requests past their deadline; drop those of other replicas.

        Order loads of adapters, also for those that are loaded where the queue is long.
        """
        actions = QueueActions()
        for ticket, error in self._adapters.take_hopeless(now):
            actions.finish(ticket, error.refusal)
        if len(self._adapters) or self.core.adapters.active:
            self._order_loads(now, actions)
        self._held.forget_lost(self.core.active)
        self.common.expire(now)
        self._batch.expire(now)
        for ticket in self.own_tickets:
            if ticket.deadline <= now:
                actions.events += self.cancel(ticket.request.request).events
                reason = f"no placement within {now - ticket.arrived:.1f} s"
                refused = Refused(code="deadline", reason=reason, retry_after_s=self.retry_after())
                actions.finish(ticket, refused)
        return actions

    def _order_loads(self, now: float, actions: QueueActions) -> None:
        """Order again what has failed, and loads of adapters that have a long queue."""
        queued: dict[str, float] = {}
        for ticket in self.common.tickets:
            if (adapter := ticket.request.adapter) is not None:
                queued[adapter] = queued.get(adapter, 0.0) + ticket.request.tokens
        adapters = self.core.adapters
        actions.loads += adapters.missing(self._adapters.take_wanted(now), now)
        actions.loads += adapters.spread(queued, now)

    def retain_routers(self, routers: Collection[str], now: float) -> None:
        """Drop the waiting requests of replicas that are not among `routers`."""
        self.common.retain_routers(routers, now)

    def due_for_rescore(self, now: float) -> list[Ticket]:
        """Own waiting tickets whose overlaps are older than `rescore_s`."""
        oldest = now - self._settings.rescore_s
        return [t for t in self.own_tickets if t.scored_at < oldest and t.request.sequence_hashes]

    def rescore(self, ticket: Ticket, overlaps: Overlaps | None, now: float) -> QueueActions:
        """Update a waiting ticket's overlaps, and its queue entry if its key changes."""
        ticket.overlaps, ticket.scored_at = overlaps, now
        entry = self.common.update(ticket, now)
        return QueueActions() if entry is None else QueueActions(events=[entry])

    def retry_after(self) -> float:
        """Expected seconds until the queue is empty, at the present rate; 1 to 60."""
        return self._rate.seconds(self.waiting_tokens)

    # from one way to wait to the next

    def _submit(self, ticket: Ticket, now: float, actions: QueueActions) -> None:
        ticket.scored_at = now
        request = ticket.request
        try:
            if not self._batch.includes(request) and not self.core.policies.admits(request, now):
                self._check_limit(ticket)
                self._resting.add(ticket)
                actions.parked.append(ticket)
            elif self._gathers and self._may_wait(request):
                if fair_class(request.hints):
                    self._classes_until = now + CLASSES_S
                self._gathered.add(ticket, now)
                self._place_due(now, actions)
            elif not self._queued(ticket, now, actions):
                self._place(ticket, now, actions)
        except Exception as error:
            self._refuse(ticket, error, now, actions)

    def _may_wait(self, request: RouteRequest) -> bool:
        """False for batch requests, which have their own order, and for agents past their wait."""
        return not (
            self._batch.includes(request) or self.core.policies.queue_boost_s(request) == inf
        )

    def _queued(self, ticket: Ticket, now: float, actions: QueueActions) -> bool:
        """Queue or refuse a request that must wait for capacity; False if it need not."""
        try:
            if not self.common.must_wait(ticket):
                return False
            self._check_limit(ticket)
            actions.events.append(self.common.add(ticket, now))
            actions.parked.append(ticket)
        except Exception as error:
            self._refuse(ticket, error, now, actions)
        return True

    def _check_limit(self, ticket: Ticket) -> None:
        """Raise RouterOverloaded if the queue is full, unless the request was queued before."""
        batch, limit = self._batch.includes(ticket.request), self._settings.queue_limit
        waiting = self.common.size(batch) + (0 if batch else len(self._resting))
        if ticket.request.arrived is None and waiting + 1 > limit:
            raise RouterOverloaded(f"{limit} requests wait already", self.retry_after())

    def _place_due(self, now: float, actions: QueueActions) -> None:
        tickets = self._gathered.take_due(now)
        if tickets:
            self._place_together(tickets, now, actions)

    def _place_together(self, tickets: list[Ticket], now: float, actions: QueueActions) -> None:
        """Place the requests of one instant, and send those whose turn it is on their rank.

        Where requests have fair classes, each counts for the capacity that the next one finds: a
        burst does not pass the queue, which gives every class its share.
        """
        classes = now < self._classes_until
        if not classes:
            tickets = [ticket for ticket in tickets if not self._queued(ticket, now, actions)]
        for ticket in tickets:
            if not classes or not self._queued(ticket, now, actions):
                self._place_or_hold(ticket, now, actions, alone=len(tickets) == 1)
        self._send_held(now, actions)
        actions.parked += [t for t in tickets if t.result is None and t.waiting is None]

    def _place_or_hold(
        self, ticket: Ticket, now: float, actions: QueueActions, alone: bool = False
    ) -> None:
        """Place a request; the router holds it until its turn on its rank.

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
            events = self._commit(decision, now)
            apart = decision.prefill is not None
            idle = alone and not decision.chosen.prefill
            if apart or self._held.note_loading(decision) or idle:
                actions.events += events
                actions.finish(ticket, decision)
                return
            key = self._entries.sort_key(ticket.request, ticket.queued_since, decision.tokens)
            self._held.add(ticket, decision, events, key, self._entries.tier(ticket.request), now)
        except Exception as error:
            self._refuse(ticket, error, now, actions)

    def _send_held(self, now: float, actions: QueueActions) -> None:
        lost: list[Ticket] = []
        for prompt in self._held.take_due(now):
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
        actions.events += [self.core.sent(event, now) for event in prompt.events]
        actions.finish(prompt.ticket, decision)

    # placing

    def _place_or_refuse(self, ticket: Ticket, now: float, actions: QueueActions) -> bool:
        """Place a request that the other routers know of; False if it is refused."""
        try:
            self._place(ticket, now, actions)
        except Exception as error:
            actions.events.append(SeqFree(ticket.request.request))
            self._refuse(ticket, error, now, actions)
            return False
        return True

    def _place(self, ticket: Ticket, now: float, actions: QueueActions) -> None:
        request = ticket.request
        slots = self._batch.room(request) if self._batch.includes(request) else None
        decision = self._decide(ticket, now, slots)
        if slots is None and self._waits_for_prefix(ticket, decision, now, actions):
            actions.parked.append(ticket)
            return
        actions.events += self._commit(decision, now)
        actions.finish(ticket, decision)

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

    def _commit(self, decision: Decision, now: float) -> list[SeqAdd]:
        self._rate.add(decision, now)
        events = self.core.commit(decision, now)
        for event in events:
            self._batch.apply(event, now)
        return events

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

    def _refuse(self, ticket: Ticket, error: Exception, now: float, actions: QueueActions) -> None:
        """Refuse for an error; an internal error fails one request, not the router.

        A request for which there is no worker waits if that is for want of its adapter.
        """
        if isinstance(error, NoWorkers) and self._adapters.begin(ticket, now):
            request, ticket.waiting = ticket.request, None
            wanted = request.adapter or "", request.placement
            actions.loads += self.core.adapters.missing([wanted], now)
            actions.parked.append(ticket)
            return
        if isinstance(error, RouteError):
            actions.finish(ticket, error.refusal)
            return
        text = f"request {ticket.request.request} could not be routed"
        self._failures.note("routing", text, error)
        reason = f"the router failed ({type(error).__name__}); see its log"
        actions.finish(ticket, Refused(code="unavailable", reason=reason))
