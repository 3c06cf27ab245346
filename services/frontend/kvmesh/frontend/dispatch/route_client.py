"""Asking routers for placements. Where one does not answer in time, another one is asked.

A router answers a question at once, or says at once that it waits in its queue. What a question
needs to be asked again, its frontend keeps: routers may freeze, restart and leave meanwhile. An
attempt that was given up is freed, however late a router comes to place it.
"""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import (
    Instance,
    Parked,
    Ping,
    Refused,
    Role,
    Routed,
    RouteNews,
    RouteRequest,
    SeqFree,
)
from kvmesh.bus.peer_choice import Peers
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher

log = logging.getLogger(__name__)
TICK_S = 0.1
ACK_S = 0.75  # for a router to say that it has a question, or to answer it
SILENT_S = 1.0  # without a sign of life, after which what waits in a router is asked elsewhere
MARGIN_S = 1.0  # for a router to say itself that there was no placement in time
MOST_LATE = 16_384  # given-up attempts whose placement would still be noticed
ANYONE = ""  # in place of an instance: the queue group of all routers
NOBODY = Refused(code="unavailable", reason="no router is running")
_news: "msgspec.msgpack.Decoder[RouteNews]" = msgspec.msgpack.Decoder(RouteNews)
Compose = Callable[[bool, float | None], RouteRequest]


@dataclass(eq=False, slots=True)
class RouteQuestion:
    """A request to be placed. `compose` makes it, with a new attempt id if its first argument is
    true; the second is when it `arrived`, as a Unix time, if it has had a place in a queue."""

    model: str
    compose: Compose
    request: RouteRequest
    deadline: float
    answer: asyncio.Future[Routed | Refused]
    began: float
    arrived: float | None
    router: str = ANYONE
    token: str = ""
    asked_at: float = 0.0
    parked: bool = False
    declined: set[str] = field(default_factory=set)
    given_up: list[str] = field(default_factory=list)


class RouteClient:
    """All questions of one frontend.

    Its clock stands still while this process does not run or has no connection: what others seem
    to have kept silent about then may be waiting to be read.
    """

    def __init__(self, bus: Bus, tracker: SequenceEventPublisher) -> None:
        self._bus = bus
        self._tracker = tracker
        self._loop = asyncio.get_running_loop()
        self._inbox = bus.new_inbox()
        self._names = itertools.count(1)
        self._questions: dict[str, RouteQuestion] = {}
        self._late: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._pings: dict[str, tuple[str, float]] = {}
        self._clock = 0.0
        self.routers = Peers(SILENT_S)

    async def open(self) -> None:
        """Hear answers; to be called before the first question."""
        await self._bus.subscribe_raw(f"{self._inbox}.*", self._receive)
        self._bus.on_reconnect.append(self._ask_again)

    async def ask(
        self, model: str, compose: Compose, patience: float, arrived: float | None = None
    ) -> Routed | Refused:
        """The answer to `compose(False, arrived)`, or to what it made later.

        Raises MessageTooLarge, or MsgspecError for an unreadable answer.
        """
        question = RouteQuestion(
            model,
            compose,
            compose(False, arrived),
            self._clock + patience + MARGIN_S,
            self._loop.create_future(),
            time.time(),
            arrived,
        )
        self._put(question)
        try:
            return await question.answer
        finally:
            self._give_up(question)
            self._free(question)

    def joined(self, card: Instance) -> None:
        if card.role is Role.ROUTER:
            self.routers.joined(card.instance)

    def left(self, card: Instance) -> None:
        """Its lease has ended: what waits there is for others."""
        if card.role is Role.ROUTER:
            self.routers.left(card.instance)
            for question in self._asked_of(card.instance):
                self._put_anew(question)

    def stop(self) -> None:
        """Nothing is worth waiting for any more."""
        for question in list(self._questions.values()):
            self._expire(question, "The server is stopping.")

    # asking

    def _put(self, question: RouteQuestion) -> None:
        """Ask the next router, or end the question if all have declined."""
        router = self.routers.choose(question.declined)
        if router is None and ANYONE in question.declined:
            self._end(question, NOBODY)
        else:
            self._put_to(question, ANYONE if router is None else router)

    def _put_to(self, question: RouteQuestion, router: str) -> None:
        self._questions.pop(question.token, None)
        question.token = str(next(self._names))
        question.router, question.parked = router, False
        question.asked_at = self._clock
        self._questions[question.token] = question
        subjects, model = self._bus.subjects, question.model
        subject = subjects.router(model) if router == ANYONE else subjects.router_at(model, router)
        try:
            self._bus.post(subject, question.request, f"{self._inbox}.{question.token}")
        except MessageTooLarge as error:
            self._fail(question, error)

    def _put_anew(self, question: RouteQuestion) -> None:
        """Ask another router, as another attempt: the one asked before may still place that one."""
        self._give_up(question)
        question.given_up.append(question.request.request)
        question.arrived = question.arrived or question.began
        question.request = question.compose(True, question.arrived)
        metrics.asked_again.labels(question.model).inc()
        self._put(question)

    def _give_up(self, question: RouteQuestion) -> None:
        """Whatever comes to this question as it was asked last, comes too late."""
        if self._questions.pop(question.token, None) is not None:
            self._late[question.token] = question.model, question.request.request
            while len(self._late) > MOST_LATE:
                self._late.popitem(last=False)

    def _free(self, question: RouteQuestion) -> None:
        """Take the attempts that were given up off the books; not before there is a later one, or
        the request would have no place in the queue for a moment."""
        for attempt in question.given_up:
            self._tracker.event(question.model, SeqFree(attempt))
        question.given_up.clear()

    def _end(self, question: RouteQuestion, answer: Routed | Refused) -> None:
        self._questions.pop(question.token, None)
        if not question.answer.done():
            question.answer.set_result(answer)

    def _expire(self, question: RouteQuestion, reason: str) -> None:
        self._give_up(question)
        self._end(question, Refused(code="deadline", reason=reason))

    def _fail(self, question: RouteQuestion, error: Exception) -> None:
        self._questions.pop(question.token, None)
        if not question.answer.done():
            question.answer.set_exception(error)

    def _asked_of(self, router: str) -> list[RouteQuestion]:
        return [each for each in self._questions.values() if each.router == router]

    def _ask_again(self) -> None:
        """The connection broke, and answers with it. The same attempts: routers know them."""
        for question in list(self._questions.values()):
            if question.router in self.routers:
                self._put_to(question, question.router)
            else:
                self._put_anew(question)

    # hearing

    def _receive(self, msg: RawMessage) -> None:
        token = msg.subject.rpartition(".")[2]
        silent = msg.headers is not None and msg.headers.get("Status") == "503"
        if token in self._pings:
            self._ponged(token, msg, silent)
            return
        question = self._questions.get(token)
        if question is None:
            if not silent:
                self._too_late(token, msg)
            return
        if silent:
            self._declined(question)
            return
        try:
            news = _news.decode(msg.data)
        except msgspec.MsgspecError as error:
            self._fail(question, error)
            return
        self.routers.replied(question.router, self._clock, self._clock - question.asked_at)
        if isinstance(news, Parked):
            question.parked, question.arrived = True, news.arrived
            self._free(question)
        elif isinstance(news, Refused) and news.moved:
            question.arrived = question.arrived or question.began
            self._declined(question)
        else:
            self._end(question, news)

    def _declined(self, question: RouteQuestion) -> None:
        """That router does not have the question, and others may know it by the same name."""
        question.declined.add(question.router)
        question.request = question.compose(False, question.arrived)
        self._put(question)

    def _too_late(self, token: str, msg: RawMessage) -> None:
        """A router has come to an attempt that was given up: nothing will run there."""
        given_up = self._late.get(token)
        if given_up is None:
            return
        model, attempt = given_up
        log.debug("a router came too late to %s", attempt)
        self._tracker.event(model, SeqFree(attempt))

    def _ponged(self, token: str, msg: RawMessage, silent: bool) -> None:
        router, sent = self._pings.pop(token)
        if silent or not self.routers.replied(router, self._clock, self._clock - sent):
            return
        log.info("router %s answers again", router)
        for question in self._asked_of(router):
            if not question.parked:  # it was lost, or would have been answered before
                self._put_to(question, router)

    # the passing of time

    async def run(self) -> None:
        """Look after the questions for ever."""
        then = self._loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if self._bus.connected:
                self._tick(min(now - then, 2 * TICK_S))
            then = now

    def _tick(self, passed: float) -> None:
        self._clock += passed
        for question in list(self._questions.values()):
            if self._clock > question.deadline:
                self._expire(question, "No router has answered in time.")
            elif self._overdue(question):
                self._despair(question)
        self._ping()

    def _overdue(self, question: RouteQuestion) -> bool:
        if question.router == ANYONE:
            return self.routers.trusts_any(question.declined)
        if question.parked:
            return self.routers.silent(question.router, self._clock)
        return self._clock - question.asked_at > ACK_S

    def _despair(self, question: RouteQuestion) -> None:
        """Ask another router, if there is one to be trusted; else this one may still answer."""
        router = question.router
        if self.routers.suspect(router):
            log.warning("router %s does not answer: others are asked", router)
            metrics.silent_routers.inc()
        if self.routers.trusts_any(question.declined):
            self._put_anew(question)

    def _ping(self) -> None:
        old = self._clock - 60.0
        for token in [token for token, (_, sent) in self._pings.items() if sent < old]:
            del self._pings[token]
        busy = {question.router for question in self._questions.values() if question.parked}
        for router in self.routers.to_probe(self._clock, busy):
            token = str(next(self._names))
            self._pings[token] = router, self._clock
            self._bus.post(self._bus.subjects.ping(router), Ping(), f"{self._inbox}.{token}")
