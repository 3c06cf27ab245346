"""Routing of one model on the bus: receives route requests, replies with placements."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from time import monotonic

from msgspec import Raw
from msgspec.structs import replace

from kvmesh.bus.client import Reply, Subscription
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    Decision,
    ExpectReturns,
    MessageDecoder,
    Parked,
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    SeqEvent,
    SeqFree,
    UnknownBase,
    encode,
)
from kvmesh.bus.packs import packed
from kvmesh.prompt_delta.hashes import ReceivedHashes
from kvmesh.returns.forecaster import NO_RETURN
from kvmesh.router import metrics
from kvmesh.router.adapter_orders import AdapterOrders
from kvmesh.router.index_client import Done, IndexClient, OverlapLookup, OverlapResult
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement_trace import PlacementTrace, placement_trace
from kvmesh.router.waiting.queue import PlacementQueue, QueueActions
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.runtime.service import Service

log = logging.getLogger(__name__)
# The clock is time.monotonic: under uvloop, loop.time has a resolution of 1 ms.
QUEUE_GROUP = "router"
REPEAT_S = 2.0  # a broken connection is noticed and made again within this time
LEAVE_S = 1.0  # for refusing the requests in flight
MAX_FORECASTS = 1024  # in one message
MOVED = Refused(code="unavailable", reason="this router is stopping", moved=True)
_requests = MessageDecoder(RouteRequest)


@dataclass(slots=True, eq=False)
class RouteCall(Ticket):
    """A ticket with its reply.

    `acks`: the sender gets a `Parked` while the request waits. `wanted` is unset when the request
    is freed or handed back.
    """

    reply: Reply | None = None
    acks: bool = False
    wanted: bool = True
    trace: PlacementTrace | None = None


class ModelRouter:
    """The core, queue and index client of one model, with its subjects."""

    def __init__(
        self,
        service: Service,
        model: str,
        prompts: ReceivedHashes,
        directory: Directory,
        post_sequences: Callable[[str, list[SeqEvent]], None],
    ) -> None:
        settings = service.settings.router
        self._prompts = prompts
        self._directory = directory
        self._post_sequences = post_sequences
        self._service = service
        self._bus = service.bus
        self._loop = asyncio.get_running_loop()
        self.model = model
        self.core = RouterCore(model, service.instance, settings, Random(settings.seed), _epoch())
        self.queue = PlacementQueue(self.core, service.instance)
        self.index = IndexClient(service.bus, model, settings.index_timeout_s)
        self._orders = AdapterOrders(service.bus, self.core, self.schedule_placement)
        self._uses_index = settings.kv_events
        self._gather_s = settings.gather_s
        self._route_subject = service.bus.subjects.route(model)
        self._seq_subject = service.bus.subjects.seq(model)
        self._metrics = metrics.RouterModelMetrics(model)
        self._placement_scheduled = False
        self._gathering_ends: asyncio.TimerHandle | None = None
        self._serving = False
        self._leaving = False
        self._lookups = 0  # of requests to place, in flight
        self._unrecorded: list[Decision | Refused | None] = []
        self._calls: dict[str, RouteCall] = {}
        self._subscriptions: list[Subscription] = []
        self._replied: deque[tuple[float, Reply, object]] = deque()  # of the last REPEAT_S seconds

    @property
    def busy(self) -> bool:
        """True if requests of the model run or wait anywhere on the mesh."""
        return bool(self._calls) or len(self.core.active) > 0

    async def serve(self) -> None:
        """Serve route requests of this model."""
        if self._serving or self._leaving:
            return
        self._serving = True
        await self.index.open()
        subjects, serve = self._bus.subjects, self._bus.serve
        own = subjects.router_at(self.model, self._service.instance)
        self._subscriptions = [
            await serve(own, _requests, self._accept_own, on_malformed=_malformed),
            await serve(
                subjects.router(self.model), _requests, self._accept, QUEUE_GROUP, _malformed
            ),
        ]
        self._bus.on_reconnect.append(self._repeat)
        log.info("routing %s by %s", self.model, self.core.settings.policy)

    async def leave(self) -> None:
        """Accept no more requests, and hand the waiting ones back to their senders."""
        self._leaving = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.wanted = False
            if call.trace is not None:
                call.trace.end(None, "moved")
            if call.reply is not None:
                call.reply(MOVED)
        try:
            async with asyncio.timeout(LEAVE_S):
                for subscription in self._subscriptions:
                    await subscription.drain()
        except (BusError, TimeoutError) as error:
            log.warning("subscriptions not drained: %s", cause(error))
        await self.close()
        if calls:
            log.info("handed back %d waiting requests of %s", len(calls), self.model)

    async def close(self) -> None:
        """Follow no orders to workers any more."""
        if self._repeat in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._repeat)
        await self._orders.close()

    def _accept_own(self, request: RouteRequest, reply: Reply) -> None:
        self._accept(request, reply, acks=True)

    def _accept(self, request: RouteRequest, reply: Reply, acks: bool = False) -> None:
        if self._leaving:
            reply(MOVED)
            return
        known = self._calls.get(request.request)
        if known is not None:  # a resend: the sender does not know whether the request arrived
            known.reply, known.acks = reply, acks
            self._acknowledge(known)
            return
        if acks and request.hints.session:
            whole = self._prompts.complete(
                request.salt, request.base, request.shared, request.sequence_hashes
            )
            if whole is None:
                reply(UnknownBase())
                return
            if request.base:
                request = replace(request, sequence_hashes=whole, base=b"", shared=0)
        call = RouteCall(request, monotonic(), reply=reply, acks=acks)
        if request.arrived is not None:
            call.queued_since = min(request.arrived - self.core.epoch, call.arrived)
        self._calls[request.request] = call
        if request.traceparent:
            call.trace = placement_trace(request.traceparent, call.arrived)
        self.route(call)

    def route(self, call: RouteCall) -> None:
        """Query the index, then place, queue or refuse the request."""
        request = call.request
        if self._uses_index and request.sequence_hashes:
            done = partial(self._on_found, call)
            trace = call.trace.query() if call.trace is not None else ""
            self._lookups += 1
            lookup = _lookup(request, done, trace)
            self.index.query(lookup, at_once=request.alone)
        else:
            self._on_overlaps(call, OverlapResult(None, 0.0))

    async def overlaps(self, sequence_hashes: bytes, salt: int | None) -> OverlapResult:
        """The overlaps of a prompt, from the index."""
        if not self._uses_index or not sequence_hashes:
            return OverlapResult(None, 0.0)
        result = await self.index.overlaps(sequence_hashes, salt)
        self._count(result)
        return result

    def _on_found(self, call: RouteCall, result: OverlapResult) -> None:
        self._lookups -= 1
        self._on_overlaps(call, result)

    def _on_overlaps(self, call: RouteCall, result: OverlapResult) -> None:
        self._count(result)
        if not call.wanted:
            return
        if call.trace is not None:
            call.trace.found(result.failure)
        call.overlaps, call.index_s, call.note = result
        call.alone = call.request.alone and not self._lookups
        now = monotonic()
        actions = self.queue.submit(call, now)
        self._metrics.core_seconds.observe(monotonic() - now)
        self._execute(actions)
        if self.queue.gathering and self._gathering_ends is None:
            self._gathering_ends = self._loop.call_later(self._gather_s, self._place_gathered)

    def _place_gathered(self) -> None:
        self._gathering_ends = None
        if self._leaving:
            return
        now = monotonic()
        actions = self.queue.place_gathered(now)
        self._metrics.core_seconds.observe(monotonic() - now)
        self._execute(actions)

    def _note_wait(self, ticket: Ticket) -> None:
        """Tell the sender, and the trace, that the request waits."""
        if isinstance(ticket, RouteCall) and ticket.result is None:
            if ticket.trace is not None:
                ticket.trace.waits(monotonic())
            if ticket.acks:
                self._acknowledge(ticket)

    def _acknowledge(self, call: RouteCall) -> None:
        """Reply `Parked` if the request waits here."""
        waits = call.wanted and call.result is None and call.scored_at > 0
        if waits and call.acks and call.reply is not None:
            arrived = call.queued_since + self.core.epoch
            call.reply(Parked(router=self._service.instance, arrived=arrived))

    def _count(self, result: OverlapResult) -> None:
        self._metrics.index_seconds.observe(result.seconds)
        if result.failure is not None:
            self._metrics.index_failures.inc()

    def apply(self, event: SeqEvent, own: bool = False) -> None:
        """Apply an event of the active-sequence stream; `own`: this router has published it."""
        if type(event) is SeqFree and not own:
            freed = self._calls.pop(event.request, None)
            if freed is not None:
                freed.wanted = False
                if freed.trace is not None:
                    freed.trace.end(None, "freed")
        self.queue.apply(event, monotonic(), own)

    def publish(self, events: list[SeqEvent]) -> None:
        """Publish events of active sequences."""
        self._post_sequences(self._seq_subject, events)

    def schedule_placement(self) -> None:
        """Place ready requests in the next loop iteration; call when load may have fallen."""
        if not (self.queue.is_empty or self._placement_scheduled):
            self._placement_scheduled = True
            self._loop.call_soon(self._place_ready)

    def _place_ready(self) -> None:
        self._placement_scheduled = False
        if not self._leaving:
            self._execute(self.queue.place_ready(monotonic()))

    def _execute(self, actions: QueueActions) -> None:
        """Publish and reply in one write; decisions follow, so that no reply waits for them.

        That of a lone request leaves with its reply: it is encoded sooner than the server and all
        readers have woken once more for it.

        The stream must have a request's `SeqAdd` before its caller can send the `SeqFree`.
        """
        if actions.events:
            self.publish(actions.events)
        for ticket in actions.done:
            self._reply(ticket)
        for ticket in actions.parked:
            self._note_wait(ticket)
        if actions.loads:
            self._orders.send(actions.loads)
        if not actions.done:
            return
        is_first = not self._unrecorded
        self._unrecorded += [each.result for each in actions.done]
        if is_first and all(ticket.alone for ticket in actions.done):
            self._publish_decisions()
        elif is_first:
            self._loop.call_soon(self._publish_decisions)

    def _publish_decisions(self) -> None:
        results, self._unrecorded = self._unrecorded, []
        records = [encode(r) for each in results if (r := self._record(each))]
        for data in packed(records) if self._directory.packs else records:
            self._bus.post(self._route_subject, Raw(data))

    def _reply(self, ticket: Ticket) -> None:
        self._calls.pop(ticket.request.request, None)
        result = ticket.result
        if not isinstance(ticket, RouteCall) or result is None:
            return
        if ticket.reply is not None:
            request = ticket.request
            reply = self._routed(result, request) if isinstance(result, Decision) else result
            ticket.reply(reply)
            if self._serving:
                self._retain(ticket.reply, reply, monotonic())
        if ticket.trace is not None:
            ticket.trace.end(result)

    def _retain(self, reply: Reply, content: object, now: float) -> None:
        self._replied.append((now, reply, content))
        while self._replied[0][0] < now - REPEAT_S:
            self._replied.popleft()

    def _repeat(self) -> None:
        """Send the last replies again: this process has connected anew, which may have lost them.

        A sender ignores a reply that it has.
        """
        since = monotonic() - REPEAT_S
        for replied_at, reply, content in self._replied:
            if replied_at >= since:
                reply(content)

    def _record(self, result: Decision | Refused | None) -> Decision | None:
        """Count a result; return the decision to publish."""
        if isinstance(result, Decision):
            self._metrics.observe_placement(result)
            return self.core.learning.with_expected_return(result)
        if result is not None:
            metrics.refusals.labels(self.model, result.code).inc()
        return None

    def tick(self, now: float) -> None:
        """Housekeeping, several times a second."""
        self.index.probe(now)
        if self._leaving:
            return
        for instance, forecasts in self.core.take_forecasts(now).items():
            subject = self._bus.subjects.returns(instance)
            for first in range(0, len(forecasts), MAX_FORECASTS):
                part = forecasts[first : first + MAX_FORECASTS]
                self._bus.post(subject, ExpectReturns(part))
            withdrawn = sum(forecast.rates == NO_RETURN for forecast in forecasts)
            self._metrics.forecasts.inc(len(forecasts) - withdrawn)
            self._metrics.withdrawals.inc(withdrawn)
        self._execute(self.queue.expire(now))
        for ticket in self.queue.due_for_rescore(now) if self._uses_index else []:
            ticket.scored_at = now
            request = ticket.request
            done = partial(self._on_rescore, ticket)
            self.index.query(_lookup(request, done))
        self.schedule_placement()

    def _on_rescore(self, ticket: Ticket, result: OverlapResult) -> None:
        """Update a waiting ticket with fresh overlaps."""
        self._count(result)
        overlaps = ticket.overlaps if result.failure else result.overlaps
        self._execute(self.queue.rescore(ticket, overlaps, monotonic()))

    def _routed(self, decision: Decision, request: RouteRequest) -> Routed:
        chosen, prefill = decision.chosen, decision.prefill
        return Routed(
            instance=chosen.instance,
            rank=chosen.rank,
            overlap=chosen.overlap,
            decision=decision if request.explain else None,
            prefill=None if prefill is None else RankKey(prefill.instance, prefill.rank),
            needs_handoff=self.core.table.needs_handoff(chosen.instance),
            possible=decision.possible,
            wait_s=decision.wait_s,
            index_s=decision.index_s,
        )

    def sweep(self, routers: set[str], now: float) -> None:
        """Drop expired state, once a second; update the epoch, as the clock may have been set."""
        self.core.epoch = _epoch()
        lost = self.core.expire(now)
        if lost:
            self._metrics.lost.inc(len(lost))
            log.warning("gave up %d requests without events, such as %s", len(lost), lost[0])
        self.queue.retain_routers(routers, now)
        self._metrics.set_levels(self.queue)


def _lookup(request: RouteRequest, done: Done, trace: str = "") -> OverlapLookup:
    session = request.hints.session or ""
    return OverlapLookup(request.sequence_hashes, request.salt, done, trace, session)


def _epoch() -> float:
    """The Unix time at which the monotonic clock was 0."""
    return time.time() - monotonic()


def _malformed(reason: str) -> Refused:
    return Refused(code="invalid", reason=f"malformed route request: {reason}")
