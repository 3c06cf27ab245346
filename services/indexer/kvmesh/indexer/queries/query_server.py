"""Server of overlap queries, for a whole index or one shard of several."""

import asyncio
import logging
import time
from dataclasses import dataclass

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.discovery.directory import READY
from kvmesh.bus.discovery.leases import STATE
from kvmesh.bus.discovery.peer_choice import Peers
from kvmesh.bus.errors import BusError, NoResponder, RequestTimeout
from kvmesh.bus.messages import (
    Instance,
    MessageDecoder,
    OverlapQuery,
    OverlapReply,
    Role,
)
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.metrics import QUERY_S
from kvmesh.indexer.queries.reply import answer, merge
from kvmesh.indexer.rank_state import RankStates
from kvmesh.prompt_delta.hashes import ReceivedHashes
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.tracing.names import OVERLAPS
from kvmesh.tracing.tracer import continued

log = logging.getLogger(__name__)
QUEUE = "index"
ANY_MODEL = "any"  # between shards the model token is unused: hashes include the model
QUERY = MessageDecoder(OverlapQuery)
_replies = MessageDecoder(OverlapReply)
MAX_FORWARDS = 1024
SHARD = "shard"  # label of an indexer's card: its shard
_NO_REPLICAS = Peers(0.0)


@dataclass(slots=True)
class QueryCounts:
    """Totals since the start, by metric name."""

    queries: int = 0
    prompts: int = 0
    bad_queries: int = 0
    shard_errors: int = 0


class QueryServer:
    """Serves queries while open; with shards, the queried one merges the others' replies."""

    def __init__(
        self, bus: Bus, states: RankStates, feed: Feed, timeout: float, instance: str
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._states = states
        self._feed = feed
        self._timeout = timeout
        self._subscriptions: list[Subscription] = []
        self._is_open = False
        self._forwards = BackgroundTasks()
        self._silent: set[int] = set()
        self._replicas: dict[str, Peers] = {}
        self._prompts = ReceivedHashes()
        self.counts = QueryCounts()

    @property
    def is_open(self) -> bool:
        """True while all subjects are served."""
        return self._is_open

    async def open(self) -> None:
        """Join the queue group and serve the instance's own subject."""
        subjects, shard = self._bus.subjects, self._states.shard
        own = subjects.index_at(self._instance)
        if shard.whole:
            handlers = {subjects.index_all: self._on_query, own: self._on_own_query}
        else:
            handlers = {
                subjects.index_shard_all(shard.label): self._on_query,
                subjects.index_all: self._on_general_query,
                own: self._on_own_query,
                subjects.index_part_at(self._instance): self._on_query,
            }
        for subject, handler in handlers.items():
            self._subscriptions.append(
                await self._bus.serve(subject, QUERY, handler, QUEUE, self._refuse)
            )
        await self._bus.flush()  # the server then knows the subscriptions
        self._is_open = True

    async def close(self) -> None:
        """Leave the queue group; queries already received still get replies."""
        self._is_open = False
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            try:
                await subscription.drain()
            except BusError as error:
                log.debug("leaving the queue group: %s", error)
        await self._forwards.wait(self._timeout)

    def _on_own_query(self, query: OverlapQuery, reply: Reply) -> None:
        """A query for this instance, which may refer to prompts that it has."""
        if query.bases:
            whole = [
                self._prompts.complete(base.salt, base.base, base.shared, rest)
                for base, rest in zip(query.bases, query.prompts, strict=False)
            ]
            prompts = [prompt for prompt in whole if prompt is not None]
            if len(prompts) < len(query.prompts):
                reply(OverlapReply([], [], incomplete=True))
                return
            query = OverlapQuery(prompts, query.salt, query.traces)
        if self._states.shard.whole:
            self._on_query(query, reply)
        else:
            self._on_general_query(query, reply)

    def _on_query(self, query: OverlapQuery, reply: Reply) -> None:
        started = time.perf_counter()
        reply(self._find(query))
        QUERY_S.observe(time.perf_counter() - started)
        if query.traces:
            _trace(query, started)

    def _find(self, query: OverlapQuery) -> OverlapReply:
        self.counts.queries += 1
        self.counts.prompts += len(query.prompts)
        try:
            states = self._states
            return answer(states.index, states.keys, query, self._feed.lag, states.removed)
        except ValueError as error:
            return self._refuse(str(error))

    def _refuse(self, _: str) -> OverlapReply:
        self.counts.bad_queries += 1
        return OverlapReply([], [])

    # --- several shards

    def _on_general_query(self, query: OverlapQuery, reply: Reply) -> None:
        shard = self._states.shard
        try:
            owners = shard.owners(query)
        except ValueError as error:
            reply(self._refuse(str(error)))
            return
        if owners.keys() == {shard.number} and len(owners[shard.number]) == len(query.prompts):
            self._on_query(query, reply)
        elif len(self._forwards) >= MAX_FORWARDS:
            self.counts.shard_errors += 1
            reply(self._refuse("too many queries wait for other shards"))
        else:
            self._forwards.start(self._gather(query, owners, reply))

    async def _gather(
        self, query: OverlapQuery, owners: dict[int, list[int]], reply: Reply
    ) -> None:
        started = time.perf_counter()
        parts = await asyncio.gather(
            *(
                self._query_shard(number, _part(query, prompts))
                for number, prompts in owners.items()
            )
        )
        if query.traces:
            _trace(query, started)
        replies = [(p, part) for p, part in zip(owners.values(), parts, strict=True) if part.rows]
        reply(merge(len(query.prompts), replies))

    async def _query_shard(self, number: int, query: OverlapQuery) -> OverlapReply:
        """The reply of one shard; an empty one if the shard does not reply."""
        shard = self._states.shard
        if number == shard.number:
            return self._find(query)
        try:
            reply = await self._query_replicas(shard.label_of(number), query)
        except BusError as error:
            self.counts.shard_errors += 1
            if number not in self._silent:
                log.warning("no overlaps from shard %d: %s", number, error)
            self._silent.add(number)
            return OverlapReply([], [])
        self._silent.discard(number)
        return reply if len(reply.rows) == len(query.prompts) else OverlapReply([], [])

    async def _query_replicas(self, label: str, query: OverlapQuery) -> OverlapReply:
        """The reply of a replica of a shard; the first gets half the time, the next the rest."""
        replicas, subjects = self._replicas.get(label, _NO_REPLICAS), self._bus.subjects
        tried: list[str] = []
        left = self._timeout
        while (replica := replicas.choose(tried)) is not None:
            tried.append(replica)
            first = left == self._timeout and replicas.trusts_any(tried)
            subject = subjects.index_part_at(replica)
            try:
                seconds = left / 2 if first else left
                return await self._bus.request(subject, query, _replies, seconds, at_once=True)
            except NoResponder:
                continue
            except RequestTimeout:
                if replicas.suspect(replica):
                    log.warning("indexer %s does not reply: querying others", replica)
                if not first:
                    raise
                left /= 2
        subject = subjects.index_shard(ANY_MODEL, label)
        return await self._bus.request(subject, query, _replies, left, at_once=True)

    # --- the other shards' replicas

    def joined(self, card: Instance) -> None:
        """Add or update the card of an indexer."""
        label = card.labels.get(SHARD, "")
        if card.role is not Role.INDEXER or label == self._states.shard.label:
            return
        if card.labels.get(STATE) == READY:
            self._replicas.setdefault(label, Peers(self._timeout / 2)).joined(card.instance)
        else:
            self.left(card)

    def left(self, card: Instance) -> None:
        for replicas in self._replicas.values():
            replicas.left(card.instance)

    def probe(self, now: float) -> None:
        """Ping the replicas that are left out, with an empty query."""
        for replicas in self._replicas.values():
            for instance in replicas.to_probe(now):
                self._forwards.start(self._probe(replicas, instance))

    async def _probe(self, replicas: Peers, instance: str) -> None:
        subject = self._bus.subjects.index_part_at(instance)
        started = time.monotonic()
        try:
            await self._bus.request(subject, OverlapQuery([]), _replies, self._timeout / 2)
        except BusError as error:
            log.debug("indexer %s: %s", instance, error)
            return
        if replicas.replied(instance, time.monotonic(), time.monotonic() - started):
            log.info("indexer %s replies again", instance)


def _trace(query: OverlapQuery, started: float) -> None:
    """Record a span for each traced prompt; `started` is on the performance counter's clock."""
    now = time.monotonic()
    began = now - (time.perf_counter() - started)
    for traceparent in query.traces:
        continued(traceparent, OVERLAPS, began).end(now)


def _part(query: OverlapQuery, prompts: list[int]) -> OverlapQuery:
    return OverlapQuery([query.prompts[index] for index in prompts], query.salt)
