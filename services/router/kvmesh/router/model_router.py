"""One model on the bus: route requests in, placements out."""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from random import Random
from time import monotonic

import msgspec

from kvmesh.bus.client import Reply
from kvmesh.bus.messages import (
    Decision,
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    SeqBatch,
    SeqEvent,
)
from kvmesh.router import metrics
from kvmesh.router.core import RouterCore
from kvmesh.router.dispatcher import Dispatcher, Steps
from kvmesh.router.index_client import Answer, IndexClient, Question
from kvmesh.router.learned import LearnedState
from kvmesh.router.policies import Policy
from kvmesh.router.ticket import Ticket
from kvmesh.runtime.service import Service

log = logging.getLogger(__name__)
# The clock is time.monotonic: under uvloop, loop.time has a resolution of 1 ms.
QUEUE_GROUP = "router"
_requests = msgspec.msgpack.Decoder(RouteRequest)


@dataclass(slots=True, eq=False)
class Call(Ticket):
    """A ticket with the way to answer it."""

    reply: Reply | None = None


class ModelRouter:
    """One model's dispatcher with its subjects."""

    def __init__(self, service: Service, model: str) -> None:
        settings = service.settings.router
        self._service = service
        self._bus = service.bus
        self._loop = asyncio.get_running_loop()
        self.model = model
        self.core = RouterCore(model, service.instance, settings, Random(settings.seed), _epoch())
        self.dispatcher = Dispatcher(self.core, service.instance)
        self.index = IndexClient(service.bus, model, settings.index_timeout_s)
        self._asks_index = settings.kv_events
        self._route_subject = service.bus.subjects.route(model)
        self._seq_subject = service.bus.subjects.seq(model)
        self._metrics = metrics.ModelMetrics(model)
        self._pump_planned = False
        self._serving = False

    async def serve(self) -> None:
        """Answer route requests of this model, from now on."""
        if self._serving:
            return
        self._serving = True
        if type(self.core.policy).state is not Policy.state:
            learned = LearnedState(self._bus, self._service.name, self.core)
            self._service.spawn(learned.run(), "learned state")
        await self.index.open()
        subject = self._bus.subjects.router(self.model)
        await self._bus.handle(subject, _requests, self._accept, QUEUE_GROUP, _malformed)
        log.info("routing %s by %s", self.model, self.core.settings.policy)

    def _accept(self, request: RouteRequest, reply: Reply) -> None:
        self.route(Call(request, monotonic(), reply=reply))

    def route(self, call: Call) -> None:
        """Ask the index, then place the call, let it wait or refuse it."""
        request = call.request
        if self._asks_index and request.sequence:
            self.index.ask(Question(request.sequence, request.salt, partial(self._scored, call)))
        else:
            self._scored(call, Answer(None, 0.0))

    async def overlaps(self, sequence: bytes, salt: int | None) -> Answer:
        """What the index says about a prompt."""
        if not self._asks_index or not sequence:
            return Answer(None, 0.0)
        answer = await self.index.find(sequence, salt)
        self._count(answer)
        return answer

    def _scored(self, call: Call, answer: Answer) -> None:
        self._count(answer)
        call.overlaps, call.index_s, call.note = answer
        now = monotonic()
        steps = self.dispatcher.submit(call, now)
        self._metrics.core_seconds.observe(monotonic() - now)
        self._carry_out(steps)

    def _count(self, answer: Answer) -> None:
        self._metrics.index_seconds.observe(answer.seconds)
        if answer.failure is not None:
            self._metrics.index_failures.inc()

    def apply(self, event: SeqEvent) -> None:
        """Apply an event of the active-sequence stream."""
        self.dispatcher.apply(event, monotonic())

    def eased(self) -> None:
        """Load may have fallen: see soon whether somebody can go."""
        if self.dispatcher.waiting and not self._pump_planned:
            self._pump_planned = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        self._carry_out(self.dispatcher.pump(monotonic()))

    def _carry_out(self, steps: Steps) -> None:
        """Answer; all else is done once the answers are on their way."""
        for ticket in steps.done:
            _answer(ticket)
        if steps.events or steps.done:
            self._loop.call_soon(self._tell, steps)

    def _tell(self, steps: Steps) -> None:
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
        self._carry_out(self.dispatcher.expire(now))
        for ticket in self.dispatcher.stale(now) if self._asks_index else []:
            ticket.scored = now
            request = ticket.request
            done = partial(self._rescored, ticket)
            self.index.ask(Question(request.sequence, request.salt, done))
        self.eased()

    def _rescored(self, ticket: Ticket, answer: Answer) -> None:
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


def _answer(ticket: Ticket) -> None:
    result = ticket.result
    if isinstance(ticket, Call) and ticket.reply is not None and result is not None:
        ticket.reply(_routed(result, ticket.request) if isinstance(result, Decision) else result)


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
