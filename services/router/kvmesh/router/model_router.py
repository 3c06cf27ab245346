"""One model on the bus: route requests in, placements out."""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from random import Random
from time import monotonic

import msgspec

from kvmesh.bus.client import Reply, Subscription
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    Decision,
    Parked,
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    SeqBatch,
    SeqEvent,
    SeqFree,
)
from kvmesh.router import metrics
from kvmesh.router.index_client import IndexClient, OverlapAnswer, OverlapQuestion
from kvmesh.router.placement.queue import PlacementQueue, QueueActions
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement.ticket import Ticket
from kvmesh.router.policies.base import Policy
from kvmesh.router.policy_state import PolicyState
from kvmesh.runtime.service import Service

log = logging.getLogger(__name__)
# The clock is time.monotonic: under uvloop, loop.time has a resolution of 1 ms.
QUEUE_GROUP = "router"
LEAVE_S = 1.0  # for questions that are on their way, to be told so
MOVED = Refused(code="unavailable", reason="this router is stopping", moved=True)
_requests = msgspec.msgpack.Decoder(RouteRequest)


@dataclass(slots=True, eq=False)
class RouteCall(Ticket):
    """A ticket with the way to answer it; `acks` if the sender is to know that it waits.

    One that is not `wanted` any more is forgotten.
    """

    reply: Reply | None = None
    acks: bool = False
    wanted: bool = True


class ModelRouter:
    """One model's dispatcher with its subjects."""

    def __init__(self, service: Service, model: str) -> None:
        settings = service.settings.router
        self._service = service
        self._bus = service.bus
        self._loop = asyncio.get_running_loop()
        self.model = model
        self.core = RouterCore(model, service.instance, settings, Random(settings.seed), _epoch())
        self.dispatcher = PlacementQueue(self.core, service.instance)
        self.index = IndexClient(service.bus, model, settings.index_timeout_s)
        self._asks_index = settings.kv_events
        self._route_subject = service.bus.subjects.route(model)
        self._seq_subject = service.bus.subjects.seq(model)
        self._metrics = metrics.RouterModelMetrics(model)
        self._pump_planned = False
        self._serving = False
        self._leaving = False
        self._calls: dict[str, RouteCall] = {}
        self._subscriptions: list[Subscription] = []

    async def serve(self) -> None:
        """Answer route requests of this model, from now on."""
        if self._serving or self._leaving:
            return
        self._serving = True
        if type(self.core.policy).state is not Policy.state:
            learned = PolicyState(self._bus, self._service.name, self.core)
            self._service.spawn(learned.run(), "learned state")
        await self.index.open()
        subjects, serve = self._bus.subjects, self._bus.serve
        own = subjects.router_at(self.model, self._service.instance)
        self._subscriptions = [
            await serve(own, _requests, self._accept_own, on_malformed=_malformed),
            await serve(
                subjects.router(self.model), _requests, self._accept, QUEUE_GROUP, _malformed
            ),
        ]
        log.info("routing %s by %s", self.model, self.core.settings.policy)

    async def leave(self) -> None:
        """Take no more requests, and give those that wait here back to who asked for them."""
        self._leaving = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.wanted = False
            if call.reply is not None:
                call.reply(MOVED)
        try:
            async with asyncio.timeout(LEAVE_S):
                for subscription in self._subscriptions:
                    await subscription.drain()
        except (BusError, TimeoutError) as error:
            log.warning("this router leaves before NATS knows: %s", cause(error))
        if calls:
            log.info("gave back %d waiting requests of %s", len(calls), self.model)

    def _accept_own(self, request: RouteRequest, reply: Reply) -> None:
        self._accept(request, reply, acks=True)

    def _accept(self, request: RouteRequest, reply: Reply, acks: bool = False) -> None:
        if self._leaving:
            reply(MOVED)
            return
        known = self._calls.get(request.request)
        if known is not None:  # its sender does not know whether the question has arrived
            known.reply, known.acks = reply, acks
            self._acknowledge(known)
            return
        call = RouteCall(request, monotonic(), reply=reply, acks=acks)
        if request.arrived is not None:
            call.place = min(request.arrived - self.core.epoch, call.arrived)
        self._calls[request.request] = call
        self.route(call)

    def route(self, call: RouteCall) -> None:
        """Ask the index, then place the call, let it wait or refuse it."""
        request = call.request
        if self._asks_index and request.sequence_hashes:
            self.index.ask(
                OverlapQuestion(request.sequence_hashes, request.salt, partial(self._scored, call))
            )
        else:
            self._scored(call, OverlapAnswer(None, 0.0))

    async def overlaps(self, sequence: bytes, salt: int | None) -> OverlapAnswer:
        """What the index says about a prompt."""
        if not self._asks_index or not sequence:
            return OverlapAnswer(None, 0.0)
        answer = await self.index.find(sequence, salt)
        self._count(answer)
        return answer

    def _scored(self, call: RouteCall, answer: OverlapAnswer) -> None:
        self._count(answer)
        if not call.wanted:
            return
        call.overlaps, call.index_s, call.note = answer
        now = monotonic()
        steps = self.dispatcher.submit(call, now)
        self._metrics.core_seconds.observe(monotonic() - now)
        self._carry_out(steps)
        if call.result is None and call.acks:
            self._loop.call_soon(self._acknowledge, call)  # once its place is known to all

    def _acknowledge(self, call: RouteCall) -> None:
        """Say that it waits here, if it does."""
        waits = call.wanted and call.result is None and call.scored > 0
        if waits and call.acks and call.reply is not None:
            arrived = call.place + self.core.epoch
            call.reply(Parked(router=self._service.instance, arrived=arrived))

    def _count(self, answer: OverlapAnswer) -> None:
        self._metrics.index_seconds.observe(answer.seconds)
        if answer.failure is not None:
            self._metrics.index_failures.inc()

    def apply(self, event: SeqEvent) -> None:
        """Apply an event of the active-sequence stream."""
        if type(event) is SeqFree:
            unwanted = self._calls.pop(event.request, None)
            if unwanted is not None:
                unwanted.wanted = False
        self.dispatcher.apply(event, monotonic())

    def eased(self) -> None:
        """Load may have fallen: see soon whether somebody can go."""
        if self.dispatcher.waiting and not self._pump_planned:
            self._pump_planned = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        if not self._leaving:
            self._carry_out(self.dispatcher.pump(monotonic()))

    def _carry_out(self, steps: QueueActions) -> None:
        """Answer; all else is done once the answers are on their way."""
        for ticket in steps.done:
            self._answer(ticket)
        if steps.events or steps.done:
            self._loop.call_soon(self._tell, steps)

    def _answer(self, ticket: Ticket) -> None:
        self._calls.pop(ticket.request.request, None)
        result = ticket.result
        if isinstance(ticket, RouteCall) and ticket.reply is not None and result is not None:
            request = ticket.request
            ticket.reply(_routed(result, request) if isinstance(result, Decision) else result)

    def _tell(self, steps: QueueActions) -> None:
        if steps.events:
            self._bus.post(self._seq_subject, SeqBatch(self._service.instance, steps.events))
        for ticket in steps.done:
            self._record(ticket.result)

    def _record(self, result: Decision | Refused | None) -> None:
        if isinstance(result, Decision):
            self._metrics.placed(result)
            self._bus.post(self._route_subject, result)
        elif result is not None:
            metrics.refusals.labels(self.model, result.code).inc()

    def tick(self, now: float) -> None:
        """House-keeping, some times a second."""
        self.index.probe(now)
        if self._leaving:
            return
        self._carry_out(self.dispatcher.expire(now))
        for ticket in self.dispatcher.stale(now) if self._asks_index else []:
            ticket.scored = now
            request = ticket.request
            done = partial(self._rescored, ticket)
            self.index.ask(OverlapQuestion(request.sequence_hashes, request.salt, done))
        self.eased()

    def _rescored(self, ticket: Ticket, answer: OverlapAnswer) -> None:
        """Take what the index says now of one that has waited for long."""
        self._count(answer)
        overlaps = ticket.overlaps if answer.failure else answer.overlaps
        self._carry_out(self.dispatcher.rescore(ticket, overlaps, monotonic()))

    def sweep(self, routers: set[str], now: float) -> None:
        """Forget what is out of date, once a second; the clock may have been set."""
        self.core.epoch = _epoch()
        lost = self.core.expire(now)
        if lost:
            self._metrics.lost.inc(len(lost))
            log.warning("gave up %d requests without news, such as %s", len(lost), lost[0])
        self.dispatcher.keep(routers, now)
        self._metrics.sizes(self.dispatcher)


def _epoch() -> float:
    """The Unix time at which the monotonic clock was 0."""
    return time.time() - monotonic()


def _routed(decision: Decision, request: RouteRequest) -> Routed:
    chosen, prefill = decision.chosen, decision.prefill
    return Routed(
        instance=chosen.instance,
        rank=chosen.rank,
        overlap=chosen.overlap,
        decision=decision if request.explain else None,
        prefill=None if prefill is None else RankKey(prefill.instance, prefill.rank),
    )


def _malformed(reason: str) -> Refused:
    return Refused(code="invalid", reason=f"malformed route request: {reason}")
