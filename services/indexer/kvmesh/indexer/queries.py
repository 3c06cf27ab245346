"""Serving overlap queries, alone or as one shard of several."""

import asyncio
import logging
import time

import msgspec
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import OverlapQuery, OverlapReply
from kvmesh.indexer.answers import answer, merge
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.holdings import Holdings
from kvmesh.indexer.metrics import QUERY_S

log = logging.getLogger(__name__)
QUEUE = "index"
ANY_MODEL = "any"  # the subject's model token does not matter between shards: hashes tell
QUERY = msgspec.msgpack.Decoder(OverlapQuery)
MAX_FORWARDS = 1024


class Desk:
    """Answers queries while open. With shards, whoever is asked gathers what the others know."""

    def __init__(
        self, bus: Bus, holdings: Holdings, feed: Feed, timeout: float, instance: str
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._holdings = holdings
        self._feed = feed
        self._timeout = timeout
        self._subscriptions: list[Subscription] = []
        self._forwards: set[asyncio.Task[None]] = set()
        self._silent: set[int] = set()
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
            }
        for subject, handler in handlers.items():
            self._subscriptions.append(
                await self._bus.handle(subject, QUERY, handler, QUEUE, self._refuse)
            )

    async def close(self) -> None:
        """Leave the queue group; queries that have arrived are still answered."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            try:
                await subscription.drain()  # type: ignore[no-untyped-call]
            except NatsError as error:
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
        subject = self._bus.subjects.index_shard(ANY_MODEL, shard.label_of(number))
        try:
            reply = await self._bus.request(subject, query, OverlapReply, self._timeout)
        except (BusError, NatsError, msgspec.MsgspecError) as error:
            self.shard_errors += 1
            if number not in self._silent:
                log.warning("prompts of shard %d count zero: %s", number, error)
            self._silent.add(number)
            return OverlapReply([], [])
        self._silent.discard(number)
        return reply if len(reply.rows) == len(query.prompts) else OverlapReply([], [])


def _part(query: OverlapQuery, places: list[int]) -> OverlapQuery:
    return OverlapQuery([query.prompts[place] for place in places], query.salt)
