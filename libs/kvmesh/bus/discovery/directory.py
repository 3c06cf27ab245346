"""The directory of live cards, read from the bucket of instances."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from math import inf

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import (
    FAILED_S,
    MARKER,
    RECORD,
    MisplacedCard,
    WorkerAges,
    decode_card,
)
from kvmesh.bus.discovery.leases import STATE, LeaseDuration
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.subjects import FAILED, stored_on
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
READY = "ready"  # `STATE` of a process that has to catch up before
OPEN_S = 10.0
MAX_NAMESAKES = 64  # live instances of one name, as of a worker that dies again and again
ROUTE_READERS = frozenset((Role.ROUTER, Role.PLANNER))


def routable(card: Instance) -> bool:
    """True if a process accepts work, according to its card."""
    return not card.draining and card.labels.get(STATE, READY) == READY


class Directory:
    """The live cards, optionally of one role; each change calls `joined` or `left`.

    A changed card of a known instance calls `joined` again. `started` of a worker's card is the
    server's time, whatever the worker states (`WorkerAges`). A card that is not renewed leaves
    after the TTL even if the server's own notice is lost, but not because of an outage of this
    process. If nobody has renewed lately, JetStream was away: the cards stay until they can be
    renewed.
    """

    def __init__(
        self,
        bus: Bus,
        limits: StreamLimits,
        joined: Callable[[Instance], None] = lambda _: None,
        left: Callable[[Instance], None] = lambda _: None,
        role: Role | None = None,
    ) -> None:
        self._bus = bus
        self._duration = LeaseDuration(bus, limits)
        self._joined = joined
        self._left = left
        self._log_once = LogOnce()  # every renewal repeats a rejected card
        self._renewed_at: dict[str, float] = {}
        self._read: dict[str, int] = {}  # hashes of the accepted messages, which renewals repeat
        self._cards: dict[str, Instance] = {}
        self._named: Counter[tuple[Role, str]] = Counter()  # the cards of each name
        self._ages = WorkerAges()
        self._failed_starts: dict[str, float] = {}  # by key: when this process read it
        self._plain: set[str] = set()  # keys of readers that take no packs
        self._prefix = stored_on(bus.subjects.instances_bucket, "")
        self._reader = StreamReader(
            bus,
            f"KV_{bus.subjects.instances_bucket}",
            f"{self._prefix}{role}.>" if role is not None else f"{self._prefix}>",
            self._on_message,
            Start(last_per_subject=True),
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def instances(self) -> list[Instance]:
        return list(self._cards.values())

    @property
    def packs(self) -> bool:
        """True if every reader of the route stream takes packs; for a directory of all roles."""
        return not self._plain

    @property
    def lease_s(self) -> float:
        """Seconds that a lease lasts without renewal."""
        return self._duration.seconds

    async def open(self) -> None:
        """Watch; return once every card that exists now is known."""
        await self._duration.refresh()
        await self._reader.open()
        await self._reader.until_caught_up(OPEN_S)
        self._task = asyncio.create_task(self._expire(), name="directory")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._reader.close()

    def _on_message(self, message: StreamMessage) -> None:
        key = message.subject.removeprefix(self._prefix)
        now = asyncio.get_running_loop().time()
        if self._reader.caught_up.is_set():
            self._bus.clock.heard(message.time, time.time())
        if key.endswith(RECORD):
            self._on_record(key.removesuffix(RECORD), message)
            return
        if key.endswith(FAILED):
            self._failed_starts.pop(key, None)
            if message.data:
                self._failed_starts[key] = now
            return
        if not message.data:
            expired = (message.headers or {}).get(MARKER) == "MaxAge"
            if expired and key in self._cards and self._none_renews(now, key):
                self._renewed_at[key] = now - self.lease_s  # `_expire` drops it half a lease later
            else:
                self._drop(key)
            return
        if self._read.get(key) == (read := hash(message.data)):
            self._renewed_at[key] = now
            return
        try:
            card = decode_card(self._bus.subjects, key, message.data)
        except MisplacedCard as error:
            if self._log_once.first(key, reason := str(error)):
                log.warning("ignored the card of %s, at %s", reason, key)
            return
        except msgspec.MsgspecError as error:
            if self._log_once.first(key, reason := str(error)):
                log.warning("ignored an unreadable card at %s: %s", key, reason)
            return
        if key not in self._cards and self._named[card.role, card.name] >= MAX_NAMESAKES:
            if self._log_once.first(f"{card.role} {card.name}", "namesakes"):
                text = "ignored further instances of %s %s: %d live ones have that name"
                log.warning(text, card.role, card.name, MAX_NAMESAKES)
            return
        self._renewed_at[key], self._read[key] = now, read
        self._take(key, self._ages.dated(key, card, message.time))

    def _on_record(self, key: str, message: StreamMessage) -> None:
        now = asyncio.get_running_loop().time()
        self._ages.record(key, message.time, message.headers, now)
        card = self._cards.get(key)
        if card is not None:
            self._take(key, self._ages.dated(key, card, message.time))

    def _take(self, key: str, card: Instance) -> None:
        if self._cards.get(key) != card:
            self._named[card.role, card.name] += key not in self._cards
            self._cards[key] = card
            plain = card.role in ROUTE_READERS and not card.unpacks
            (self._plain.add if plain else self._plain.discard)(key)
            self._joined(card)

    def _drop(self, key: str) -> None:
        self._renewed_at.pop(key, None)
        self._read.pop(key, None)
        self._ages.ended(key, asyncio.get_running_loop().time())
        self._plain.discard(key)
        card = self._cards.pop(key, None)
        if card is not None:
            self._named[card.role, card.name] -= 1
            self._named += Counter()  # drops those of which none is left
            self._left(card)

    def _none_renews(self, now: float, key: str) -> bool:
        """True if no other card was renewed within half of a lease."""
        others = (seen for other, seen in self._renewed_at.items() if other != key)
        return now - max(others, default=-inf) > self.lease_s / 2

    async def delete_left_records(self) -> None:
        """Delete records of workers that are gone, and old failed starts; raises BusError.

        For processes that may write the keys of other workers. A record that another one has
        deleted meanwhile is left alone, as is that of a worker whose lease the server has.
        """
        if self._bus.connected_for < self.lease_s:
            return
        bucket = self._bus.bucket(self._bus.subjects.instances_bucket)
        now = asyncio.get_running_loop().time()
        for key in [key for key, since in self._failed_starts.items() if now - since > FAILED_S]:
            await bucket.delete(key)
        for key in self._ages.left(now):
            if not self._ages.is_left(key) or await self._is_stored(key):
                continue
            await bucket.delete(f"{key}{RECORD}")

    async def _expire(self) -> None:
        while True:
            await next_tick(self.lease_s / 3)
            limit_s = self.lease_s * 1.5
            if self._bus.connected_for < limit_s:
                continue
            now = asyncio.get_running_loop().time()
            overdue = [key for key, seen in self._renewed_at.items() if now - seen > limit_s]
            try:
                async with asyncio.timeout(self.lease_s):
                    await self._duration.refresh()
                    for key in overdue:
                        if not await self._is_stored(key):
                            self._drop(key)
            except (BusError, TimeoutError) as error:
                log.debug("cards of ended leases stay for now: %s", cause(error))

    async def _is_stored(self, key: str) -> bool:
        """True if the server has the card; raises BusError, as in a cluster without quorum."""
        bucket = self._bus.subjects.instances_bucket
        try:
            return bool(
                (await self._bus.js.get_msg(f"KV_{bucket}", subject=self._prefix + key)).data
            )
        except NotFound:
            return False
