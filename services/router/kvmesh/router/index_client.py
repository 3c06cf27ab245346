"""Asking the index for overlaps: no task per question, and those that arrive together share one.

Indexers are asked by instance, in turn. One that does not answer in time is left out until it
answers a probe, and what it was asked another one is asked once.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import OverlapQuery, RankKey
from kvmesh.bus.peer_choice import Peers
from kvmesh.router.scoring.overlaps import Overlaps

log = logging.getLogger(__name__)
MOST_PROMPTS = 64
MOST_FLIGHTS = 4
STEADY_S = 5.0  # without a failure, after which an outage is over: one of several indexers may hang
ROW = 20  # five uint32


class _Reply(msgspec.Struct, array_like=True):
    """An OverlapReply whose ranks, much the same each time, are decoded only when they differ."""

    ranks: msgspec.Raw
    rows: list[bytes]


_replies = msgspec.msgpack.Decoder(_Reply)
_ranks = msgspec.msgpack.Decoder(list[RankKey])


class OverlapAnswer(NamedTuple):
    """Overlaps, or None and why not; `seconds` is how long the query took."""

    overlaps: Overlaps | None
    seconds: float
    failure: str | None = None


Done = Callable[[OverlapAnswer], None]


class OverlapQuestion(NamedTuple):
    """A prompt, given as its packed sequence hashes, and who wants to know."""

    sequence_hashes: bytes
    salt: int | None
    done: Done


class QueryInFlight(NamedTuple):
    """One query on its way to `indexer`, or to whoever is free. `tried` have not answered it."""

    started: float
    questions: list[OverlapQuestion]
    timer: asyncio.TimerHandle
    indexer: str | None
    tried: tuple[str, ...]


class IndexClient:
    """One model's index, over the bus. Failures are answers; an outage is logged once."""

    def __init__(self, bus: Bus, model: str, timeout: float) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._subject = bus.subjects.index(model)
        self._model = model
        self._timeout = timeout
        self._inbox = bus.new_inbox()
        self._queued: list[OverlapQuestion] = []
        self._flights: dict[str, QueryInFlight] = {}
        self._sent = 0
        self._failing = False
        self._outage = False
        self._failed = 0.0
        self._known: tuple[bytes, list[RankKey]] = (b"", [])
        self._probes: dict[str, tuple[str, float]] = {}
        self.indexers = Peers(timeout)

    @property
    def away(self) -> bool:
        """Whether questions have been left unanswered lately, and none was answered well since."""
        return self._outage

    async def open(self) -> None:
        """Hear answers; to be called before the first question."""
        await self._bus.subscribe_raw(f"{self._inbox}.*", self._receive)

    def ask(self, question: OverlapQuestion) -> None:
        """Have `question.done` called with the overlaps, perhaps before this returns."""
        if self._failing and self._flights:  # one at a time tries, the others need not wait
            question.done(OverlapAnswer(None, 0.0, "index unavailable"))
            return
        self._queued.append(question)
        if len(self._flights) < MOST_FLIGHTS:
            self._send()

    async def find(self, sequence: bytes, salt: int | None = None) -> OverlapAnswer:
        """The overlaps of a prompt."""
        future: asyncio.Future[OverlapAnswer] = self._loop.create_future()

        def done(answer: OverlapAnswer) -> None:
            if not future.done():
                future.set_result(answer)

        self.ask(OverlapQuestion(sequence, salt, done))
        return await future

    def _send(self) -> None:
        questions = self._queued[:MOST_PROMPTS]
        del self._queued[:MOST_PROMPTS]
        if not questions:
            return
        self._take_off(questions, monotonic())

    def _take_off(
        self, questions: list[OverlapQuestion], started: float, tried: tuple[str, ...] = ()
    ) -> None:
        indexer = self.indexers.choose(tried)
        token = self._name()
        timer = self._loop.call_later(self._timeout, self._late, token)
        self._flights[token] = QueryInFlight(started, questions, timer, indexer, tried)
        salts = {question.salt for question in questions}
        query = OverlapQuery(
            [question.sequence_hashes for question in questions],
            salts.pop() if len(salts) == 1 else None,
        )
        subject = self._subject if indexer is None else self._bus.subjects.index_at(indexer)
        try:
            self._bus.post(subject, query, f"{self._inbox}.{token}")
        except MessageTooLarge as error:
            self._land(token, None, str(error))

    def _name(self) -> str:
        self._sent += 1
        return str(self._sent)

    def probe(self, now: float) -> None:
        """Ask the indexers that are left out for a sign of life; call some times a second.

        While questions fail all are asked: who has no more questions must still see the end of it.
        """
        for token in [token for token, (_, sent) in self._probes.items() if sent < now - 60.0]:
            del self._probes[token]
        doubted = self.indexers.instances if self._outage else ()
        for indexer in self.indexers.to_probe(now, doubted):
            token = self._name()
            self._probes[token] = indexer, now
            subject = self._bus.subjects.index_at(indexer)
            self._bus.post(subject, OverlapQuery([]), f"{self._inbox}.{token}")

    def _receive(self, msg: RawMessage) -> None:
        token = msg.subject.rpartition(".")[2]
        silent = msg.headers is not None and msg.headers.get("Status") == "503"
        if token in self._probes:
            indexer, sent = self._probes.pop(token)
            if not silent:
                self._probed(indexer, sent, msg.data)
            return
        if token not in self._flights:
            return
        if silent:
            self._unanswered(token)
            return
        try:
            reply = _replies.decode(msg.data)
            ranks = self._ranks_of(reply.ranks)
            _check(reply, len(ranks), len(self._flights[token].questions))
        except msgspec.MsgspecError as error:
            self._land(token, None, f"unreadable answer: {error}")
            return
        self._land(token, [Overlaps(ranks, rows) for rows in reply.rows])

    def _probed(self, indexer: str, sent: float, data: bytes) -> None:
        try:
            _replies.decode(data)
        except msgspec.MsgspecError:  # that of a question is logged
            return
        if self.indexers.replied(indexer, monotonic(), monotonic() - sent):
            log.info("indexer %s answers again", indexer)
        if self.indexers.trusts(indexer):
            self._note("")

    def _ranks_of(self, raw: msgspec.Raw) -> list[RankKey]:
        packed = bytes(raw)
        if packed != self._known[0]:
            self._known = (packed, _ranks.decode(packed))
        return self._known[1]

    def _late(self, token: str) -> None:
        """The time for an answer is over: ask another indexer, if it is the first time."""
        flight = self._flights.get(token)
        if flight is None:
            return
        if flight.indexer is not None:
            if self.indexers.suspect(flight.indexer):
                log.warning("indexer %s does not answer: others are asked", flight.indexer)
            if not flight.tried and self.indexers.trusts_any():
                del self._flights[token]
                self._take_off(flight.questions, flight.started, (flight.indexer,))
                return
        where = flight.indexer or self._subject
        self._land(token, None, f"no answer of {where} within {self._timeout:g} s")

    def _unanswered(self, token: str) -> None:
        """Nobody listens there: ask the next one, and in the end whoever is in the group."""
        flight = self._flights[token]
        if flight.indexer is None:
            self._land(token, None, f"nobody answers on {self._subject}")
            return
        del self._flights[token]
        flight.timer.cancel()
        self._take_off(flight.questions, flight.started, (*flight.tried, flight.indexer))

    def _land(self, token: str, found: list[Overlaps] | None, failure: str = "") -> None:
        flight = self._flights.pop(token, None)
        if flight is None:
            return
        flight.timer.cancel()
        self._note(failure)
        seconds = monotonic() - flight.started
        for at, question in enumerate(flight.questions):
            if found is None:
                question.done(OverlapAnswer(None, seconds, f"index unavailable: {failure}"))
            else:
                question.done(OverlapAnswer(found[at], seconds))
        self._send()

    def _note(self, failure: str) -> None:
        now = monotonic()
        self._failing = bool(failure)
        if failure:
            if not self._outage:
                log.warning("routing %s without overlaps: %s", self._model, failure)
            self._outage, self._failed = True, now
        elif self._outage and now - self._failed > STEADY_S:
            log.info("the index of %s answers again", self._model)
            self._outage = False


def _check(reply: _Reply, ranks: int, prompts: int) -> None:
    if len(reply.rows) != prompts:
        raise msgspec.ValidationError(f"{len(reply.rows)} answers to {prompts} prompts")
    for rows in reply.rows:
        if len(rows) % ROW:
            raise msgspec.ValidationError(f"rows of {len(rows)} bytes")
        if rows and np.frombuffer(rows, "<u4")[::5].max() >= ranks:
            raise msgspec.ValidationError("a row names no rank")
