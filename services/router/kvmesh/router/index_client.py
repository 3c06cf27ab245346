"""Client of the index: batches overlap lookups into queries, without a task per lookup.

Indexers are queried by instance, in turn. One that does not reply in time is left out until it
replies to a probe, and its lookups are sent to another one once.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.discovery.peer_choice import Peers
from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import MessageDecoder, OverlapQuery, PromptBase, RankKey, Removal
from kvmesh.hashing import HASH_BYTES
from kvmesh.prompt_delta.hashes import SentHashes
from kvmesh.router.scoring.overlaps import Overlaps

log = logging.getLogger(__name__)
MAX_PROMPTS, MAX_BYTES = 64, 256 << 10  # of the prompts of one query
MAX_IN_FLIGHT = 4
STEADY_S = 5.0  # without a failure, then an outage is over: one of several indexers may hang
ROW = 20  # five uint32


class _Reply(msgspec.Struct, array_like=True):
    """An OverlapReply with undecoded ranks: decoded only when they change, which is rare."""

    ranks: msgspec.Raw
    rows: list[bytes]
    lag: float = 0.0
    removals: list[list[Removal]] = []
    since: float = 0.0
    incomplete: bool = False


_replies = MessageDecoder(_Reply)
_ranks = MessageDecoder(list[RankKey])


class OverlapResult(NamedTuple):
    """Overlaps, or None and the failure; `seconds` is the duration of the query."""

    overlaps: Overlaps | None
    seconds: float
    failure: str | None = None


Done = Callable[[OverlapResult], None]


class OverlapLookup(NamedTuple):
    """A prompt's packed sequence hashes, its salt if known, and the callback of the result.

    `trace` is the `traceparent` of a traced request, `session` that of the prompt, if it has one.
    """

    sequence_hashes: bytes
    salt: int | None
    done: Done
    trace: str = ""
    session: str = ""


class QueryInFlight(NamedTuple):
    """One query to `indexer`, or to the queue group if None; `tried` did not reply to it."""

    started: float
    lookups: list[OverlapLookup]
    timer: asyncio.TimerHandle
    indexer: str | None
    tried: tuple[str, ...]
    has_bases: bool


class IndexClient:
    """One model's index, over the bus. Failures are results; an outage is logged once."""

    def __init__(self, bus: Bus, model: str, timeout: float) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._subject = bus.subjects.index(model)
        self._model = model
        self._timeout = timeout
        self._inbox = bus.new_inbox()
        self._queued: list[OverlapLookup] = []
        self._in_flight: dict[str, QueryInFlight] = {}
        self._sent = 0
        self._failing = False
        self._outage = False
        self._failed = 0.0
        self._ranks_cache: tuple[bytes, list[RankKey]] = (b"", [])
        self._probes: dict[str, tuple[str, float]] = {}
        self._sent_prompts = SentHashes()
        self._completing: set[str] = set()
        self.indexers = Peers(timeout)

    @property
    def outage(self) -> bool:
        """True if queries failed lately and replies have not been steady since."""
        return self._outage

    async def open(self) -> None:
        """Subscribe to replies; call before the first lookup."""
        await self._bus.subscribe_raw(f"{self._inbox}.*", self._on_reply)

    def query(self, lookup: OverlapLookup, at_once: bool = False) -> None:
        """Look up overlaps; `lookup.done` gets the result, possibly before this returns.

        Unless it is to be sent `at_once`, a lookup goes with the others of the same iteration of
        the event loop.
        """
        if self._failing and self._in_flight:  # while failing, one query at a time is tried
            lookup.done(OverlapResult(None, 0.0, "index unavailable"))
            return
        self._queued.append(lookup)
        if at_once:
            self._flush()
        elif len(self._queued) == 1:
            self._loop.call_soon(self._flush)

    async def overlaps(self, sequence_hashes: bytes, salt: int | None = None) -> OverlapResult:
        """The overlaps of a prompt."""
        future: asyncio.Future[OverlapResult] = self._loop.create_future()

        def done(result: OverlapResult) -> None:
            if not future.done():
                future.set_result(result)

        self.query(OverlapLookup(sequence_hashes, salt, done))
        return await future

    def _flush(self) -> None:
        while self._queued and len(self._in_flight) < MAX_IN_FLIGHT:
            count, size = 1, len(self._queued[0].sequence_hashes)
            for lookup in self._queued[1:MAX_PROMPTS]:
                size += len(lookup.sequence_hashes)
                if size > MAX_BYTES:
                    break
                count += 1
            lookups = self._queued[:count]
            del self._queued[:count]
            self._send_query(lookups, monotonic())

    def _send_query(
        self, lookups: list[OverlapLookup], started: float, tried: tuple[str, ...] = ()
    ) -> None:
        indexer = self.indexers.choose(tried)
        token = self._next_token()
        timer = self._loop.call_later(self._timeout, self._on_timeout, token)
        salts = {lookup.salt for lookup in lookups}
        bases = self._bases(indexer, lookups) if indexer in self._completing else []
        prompts = [lookup.sequence_hashes for lookup in lookups]
        for at, base in enumerate(bases):
            prompts[at] = prompts[at][base.shared * HASH_BYTES :]
        query = OverlapQuery(
            prompts,
            salts.pop() if len(salts) == 1 else None,
            [lookup.trace for lookup in lookups if lookup.trace],
            bases,
        )
        has_bases = any(base.shared for base in bases)
        self._in_flight[token] = QueryInFlight(started, lookups, timer, indexer, tried, has_bases)
        subject = self._subject if indexer is None else self._bus.subjects.index_at(indexer)
        try:
            self._bus.post(subject, query, f"{self._inbox}.{token}")
        except MessageTooLarge as error:
            self._complete(token, None, str(error))

    def _bases(self, indexer: str, lookups: list[OverlapLookup]) -> list[PromptBase]:
        """The prompts that the indexer has of the same sessions; empty if no prompt is of one."""
        bases = []
        for lookup in lookups:
            base, shared = b"", 0
            if lookup.session:
                key = indexer, lookup.salt, lookup.session
                base, shared = self._sent_prompts.base_of(key, lookup.sequence_hashes)
                self._sent_prompts.store(key, lookup.sequence_hashes)
            bases.append(PromptBase(base, shared, lookup.salt))
        return bases if any(lookup.session for lookup in lookups) else []

    def joined(self, indexer: str, completes_prompts: bool) -> None:
        """Query this indexer, too; it takes deltas of prompts if it `completes_prompts`."""
        self.indexers.joined(indexer)
        if completes_prompts:
            self._completing.add(indexer)

    def left(self, indexer: str) -> None:
        self.indexers.left(indexer)
        self._completing.discard(indexer)

    def _next_token(self) -> str:
        self._sent += 1
        return str(self._sent)

    def probe(self, now: float) -> None:
        """Probe the indexers that are left out; call several times a second.

        During an outage all are probed, so that a router without lookups detects its end.
        """
        for token in [token for token, (_, sent) in self._probes.items() if sent < now - 60.0]:
            del self._probes[token]
        extra = self.indexers.instances if self._outage else ()
        for indexer in self.indexers.to_probe(now, extra):
            token = self._next_token()
            self._probes[token] = indexer, now
            subject = self._bus.subjects.index_at(indexer)
            self._bus.post(subject, OverlapQuery([]), f"{self._inbox}.{token}")

    def _on_reply(self, msg: RawMessage) -> None:
        token = msg.subject.rpartition(".")[2]
        no_responder = msg.headers is not None and msg.headers.get("Status") == "503"
        if token in self._probes:
            indexer, sent = self._probes.pop(token)
            if not no_responder:
                self._on_probe(indexer, sent, msg.data)
            return
        if token not in self._in_flight:
            return
        if no_responder:
            self._on_no_responder(token)
            return
        try:
            reply = _replies.decode(msg.data)
            if reply.incomplete and self._in_flight[token].has_bases:
                self._send_whole(token)
                return
            ranks = self._ranks_of(reply.ranks)
            _check(reply, len(ranks), len(self._in_flight[token].lookups))
        except msgspec.MsgspecError as error:
            self._complete(token, None, f"unreadable reply: {error}")
            return
        removals = reply.removals or [[] for _ in reply.rows]
        found = [
            Overlaps(ranks, rows, removed, reply.since)
            for rows, removed in zip(reply.rows, removals, strict=True)
        ]
        self._complete(token, found)

    def _on_probe(self, indexer: str, sent: float, data: bytes) -> None:
        try:
            _replies.decode(data)
        except msgspec.MsgspecError:  # logged for lookups only
            return
        if self.indexers.replied(indexer, monotonic(), monotonic() - sent):
            log.info("indexer %s replies again", indexer)
        if self.indexers.trusts(indexer):
            self._log_outage("")

    def _ranks_of(self, raw: msgspec.Raw) -> list[RankKey]:
        packed = bytes(raw)
        if packed != self._ranks_cache[0]:
            self._ranks_cache = (packed, _ranks.decode(packed))
        return self._ranks_cache[1]

    def _on_timeout(self, token: str) -> None:
        """Query another indexer once; then fail the lookups."""
        query = self._in_flight.get(token)
        if query is None:
            return
        if query.indexer is not None:
            if self.indexers.suspect(query.indexer):
                log.warning("indexer %s does not reply: querying others", query.indexer)
            if not query.tried and self.indexers.trusts_any():
                del self._in_flight[token]
                self._send_query(query.lookups, query.started, (query.indexer,))
                return
        where = query.indexer or self._subject
        self._complete(token, None, f"no reply from {where} within {self._timeout:g} s")

    def _on_no_responder(self, token: str) -> None:
        """Query the next indexer, and the queue group when none is left."""
        query = self._in_flight[token]
        if query.indexer is None:
            self._complete(token, None, f"no responder on {self._subject}")
            return
        del self._in_flight[token]
        query.timer.cancel()
        self._send_query(query.lookups, query.started, (*query.tried, query.indexer))

    def _send_whole(self, token: str) -> None:
        """The indexer has evicted a base, or has restarted: send it the whole prompts."""
        query = self._in_flight.pop(token)
        query.timer.cancel()
        for lookup in query.lookups:
            self._sent_prompts.forget((query.indexer or "", lookup.salt, lookup.session))
        self._send_query(query.lookups, query.started, query.tried)

    def _complete(self, token: str, found: list[Overlaps] | None, failure: str = "") -> None:
        query = self._in_flight.pop(token, None)
        if query is None:
            return
        query.timer.cancel()
        self._log_outage(failure)
        seconds = monotonic() - query.started
        for at, lookup in enumerate(query.lookups):
            if found is None:
                lookup.done(OverlapResult(None, seconds, f"index unavailable: {failure}"))
            else:
                lookup.done(OverlapResult(found[at], seconds))
        self._flush()

    def _log_outage(self, failure: str) -> None:
        now = monotonic()
        self._failing = bool(failure)
        if failure:
            if not self._outage:
                log.warning("without overlaps of %s for now: %s", self._model, failure)
            self._outage, self._failed = True, now
        elif self._outage and now - self._failed > STEADY_S:
            log.info("the index of %s replies again", self._model)
            self._outage = False


def _check(reply: _Reply, ranks: int, prompts: int) -> None:
    if len(reply.rows) != prompts:
        raise msgspec.ValidationError(f"{len(reply.rows)} replies to {prompts} prompts")
    if reply.removals and len(reply.removals) != prompts:
        raise msgspec.ValidationError(f"removals of {len(reply.removals)} of {prompts} prompts")
    for rows in reply.rows:
        if len(rows) % ROW:
            raise msgspec.ValidationError(f"rows of {len(rows)} bytes")
        if rows and np.frombuffer(rows, "<u4")[::5].max() >= ranks:
            raise msgspec.ValidationError("a row names no rank")
