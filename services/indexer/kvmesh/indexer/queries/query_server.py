"""Serving overlap queries, alone or as one shard of several."""

import asyncio
import logging
import time

import msgspec

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.discovery import READY, STATE
from kvmesh.bus.errors import BusError, NoResponder, RequestTimeout
from kvmesh.bus.messages import (
    Instance,
    OverlapQuery,
    OverlapReply,
    Role,
)
from kvmesh.bus.peer_choice import Peers
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.metrics import QUERY_S
from kvmesh.indexer.queries.reply import answer, merge
from kvmesh.indexer.rank_state import RankStates

log = logging.getLogger(__name__)
QUEUE = "index"
ANY_MODEL = "any"  # the subject's model token does not matter between shards: hashes tell
QUERY = msgspec.msgpack.Decoder(OverlapQuery)
_replies = msgspec.msgpack.Decoder(OverlapReply)
MAX_FORWARDS = 1024
SHARD = "shard"  # the label on an indexer's card that names its part
_NONE = Peers(0.0)


class QueryServer:
    """Answers queries while open. With shards, whoever is asked gathers what the others know."""

    def __init__(
        self, bus: Bus, holdings: RankStates, feed: Feed, timeout: float, instance: str
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._holdings = holdings
        self._feed = feed
        self._timeout = timeout
        self._subscriptions: list[Subscription] = []
        self._forwards: set[asyncio.Task[None]] = set()
        self._silent: set[int] = set()
        self._replicas: dict[str, Peers] = {}
        self.queries = 0
        self.prompts = 0
        self.bad = 0
        self.shard_errors = 0

    @property
    def is_open(self) -> bool:
        return bool(self._subscriptions)

    async def open(self) -> None:
        """Join the queue group, and answer to one's own name."""
        subjects, shard = self._bus.subjects, self._holdings.shard
        own = subjects.index_at(self._instance)
        if shard.whole:
            handlers = {subjects.index_all: self._on_query, own: self._on_query}
        else:
            handlers = {
                subjects.index_shard_all(shard.label): self._on_query,
                subjects.index_all: self._on_general_query,
                own: self._on_general_query,
                subjects.index_part_at(self._instance): self._on_query,
            }
        for subject, handler in handlers.items():
            self._subscriptions.append(
                await self._bus.serve(subject, QUERY, handler, QUEUE, self._refuse)
            )

    async def close(self) -> None:
        """Leave the queue group; queries that have arrived are still answered."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            try:
                await subscription.drain()
            except BusError as error:
                log.debug("leaving the queue group: %s", error)
        if self._forwards:
            await asyncio.wait(self._forwards, timeout=self._timeout)

    def _on_query(self, query: OverlapQuery, reply: Reply) -> None:
        started = time.perf_counter()
        reply(self._answer(query))
        QUERY_S.observe(time.perf_counter() - started)

    def _answer(self, query: OverlapQuery) -> OverlapReply:
        self.queries += 1
        self.prompts += len(query.prompts)
        try:
            return answer(self._holdings.index, self._holdings.keys, query, self._feed.lag)
        except ValueError as error:
            return self._refuse(str(error))

    def _refuse(self, _: str) -> OverlapReply:
        self.bad += 1
        return OverlapReply([], [])

    # --- several shards

    def _on_general_query(self, query: OverlapQuery, reply: Reply) -> None:
        shard = self._holdings.shard
        try:
            owners = shard.owners(query)
        except ValueError as error:
            reply(self._refuse(str(error)))
            return
        if owners.keys() == {shard.number} and len(owners[shard.number]) == len(query.prompts):
            self._on_query(query, reply)
        elif len(self._forwards) >= MAX_FORWARDS:
            self.shard_errors += 1
            reply(self._refuse("too many queries wait for other shards"))
        else:
            task = asyncio.create_task(self._gather(query, owners, reply))
            self._forwards.add(task)
            task.add_done_callback(self._forwards.discard)

    async def _gather(
        self, query: OverlapQuery, owners: dict[int, list[int]], reply: Reply
    ) -> None:
        parts = await asyncio.gather(
            *(self._ask(number, _part(query, places)) for number, places in owners.items())
        )
        replies = [(p, part) for p, part in zip(owners.values(), parts, strict=True) if part.rows]
        reply(merge(len(query.prompts), replies))

    async def _ask(self, number: int, query: OverlapQuery) -> OverlapReply:
        """What one shard knows; nothing if it does not answer."""
        shard = self._holdings.shard
        if number == shard.number:
            return self._answer(query)
        try:
            reply = await self._ask_replicas(shard.label_of(number), query)
        except BusError as error:
            self.shard_errors += 1
            if number not in self._silent:
                log.warning("prompts of shard %d count zero: %s", number, error)
            self._silent.add(number)
            return OverlapReply([], [])
        self._silent.discard(number)
        return reply if len(reply.rows) == len(query.prompts) else OverlapReply([], [])

    async def _ask_replicas(self, label: str, query: OverlapQuery) -> OverlapReply:
        """The answer of a replica of a shard; a silent one leaves time to ask another."""
        replicas, subjects = self._replicas.get(label, _NONE), self._bus.subjects
        tried: list[str] = []
        left = self._timeout
        while (replica := replicas.choose(tried)) is not None:
            tried.append(replica)
            first = left == self._timeout and replicas.trusts_any(tried)
            subject = subjects.index_part_at(replica)
            try:
                seconds = left / 2 if first else left
                return await self._bus.request(subject, query, _replies, seconds)
            except NoResponder:
                continue
            except RequestTimeout:
                if replicas.suspect(replica):
                    log.warning("indexer %s does not answer: others are asked", replica)
                if not first:
                    raise
                left /= 2
        subject = subjects.index_shard(ANY_MODEL, label)
        return await self._bus.request(subject, query, _replies, left)

    # --- the other shards' replicas

    def joined(self, card: Instance) -> None:
        """Take in the card of an indexer, or a change to it."""
        label = card.labels.get(SHARD, "")
        if card.role is not Role.INDEXER or label == self._holdings.shard.label:
            return
        if card.labels.get(STATE) == READY:
            self._replicas.setdefault(label, Peers(self._timeout / 2)).joined(card.instance)
        else:
            self.left(card)

    def left(self, card: Instance) -> None:
        for replicas in self._replicas.values():
            replicas.left(card.instance)

    def probe(self, now: float) -> None:
        """Ask the replicas that are left out for a sign of life."""
        for replicas in self._replicas.values():
            for instance in replicas.to_probe(now):
                task = asyncio.create_task(self._probe(replicas, instance))
                self._forwards.add(task)
                task.add_done_callback(self._forwards.discard)

    async def _probe(self, replicas: Peers, instance: str) -> None:
        subject = self._bus.subjects.index_part_at(instance)
        began = time.monotonic()
        try:
            await self._bus.request(subject, OverlapQuery([]), _replies, self._timeout / 2)
        except BusError as error:
            log.debug("indexer %s: %s", instance, error)
            return
        if replicas.replied(instance, time.monotonic(), time.monotonic() - began):
            log.info("indexer %s answers again", instance)


def _part(query: OverlapQuery, places: list[int]) -> OverlapQuery:
    return OverlapQuery([query.prompts[place] for place in places], query.salt)
