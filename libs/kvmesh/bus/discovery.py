"""Discovery: each process publishes a card under a lease; every process may watch the cards.

A lease is a key of the instances bucket, renewed three times per TTL. It ends in one of three
ways: its owner deletes it on a clean exit, another process deletes it after it found no listener on
the owner's subjects, or the server expires it. In the last two cases an owner that is still alive
learns of it at the next renewal: a process that was frozen must not continue as before.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, Conflict, NotFound, cause
from kvmesh.bus.jetstream import Bucket
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Instance, Role, encode
from kvmesh.bus.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.streams import StreamLimits, ensure_streams
from kvmesh.bus.subjects import name_of
from kvmesh.bus.translation import bus_errors

log = logging.getLogger(__name__)
STATE = "state"  # label of a process that has to catch up before it is ready
READY = "ready"
OPEN_S = 10.0
_card_decoder = msgspec.msgpack.Decoder(Instance)


class LeaseDuration:
    """Seconds that a lease lasts without renewal: the bucket's TTL, not this process's setting.

    Processes with different settings would otherwise see each other leave and return repeatedly.
    """

    def __init__(self, bus: Bus, limits: StreamLimits) -> None:
        self._bus = bus
        self._configured = limits.lease_s
        self._read_at = -1.0
        self.bucket_created: object = None
        self.seconds = limits.lease_s

    async def refresh(self) -> None:
        """Read the TTL again after a reconnect, maybe to another server; raises BusError."""
        if self._read_at > self._bus.connected_at:
            return
        read_at = asyncio.get_running_loop().time()
        status = await (await _bucket(self._bus)).status()
        self.seconds = status.ttl or self._configured
        self.bucket_created = status.stream_info.created
        self._read_at = read_at
        if self.seconds != self._configured:
            log.info(
                "leases last %g s here, not the configured %g s", self.seconds, self._configured
            )


def routable(card: Instance) -> bool:
    """True if a process accepts work, according to its card."""
    return not card.draining and card.labels.get(STATE, READY) == READY


class Lease:
    """Keeps `card` in the instances bucket until closed.

    `lapsed` runs when the lease has ended meanwhile: other processes consider this one dead. A
    bucket that was lost with its server does not count.
    """

    def __init__(
        self,
        bus: Bus,
        card: Instance,
        limits: StreamLimits,
        lapsed: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._limits = limits
        self._duration = LeaseDuration(bus, limits)
        self._lapsed = lapsed
        self._revision: int | None = None
        self._bucket_created: object = None
        self._renewing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.card = card

    async def open(self) -> None:
        """Join. `started` of the card becomes the server's time: the later of two instances counts,
        and the clocks of their machines may differ.
        """
        await self._duration.refresh()
        await self._renew()
        self.card = msgspec.structs.replace(self.card, started=await self._stored_at())
        await self._renew()
        self._task = asyncio.create_task(self._renew_until_closed(), name="lease")

    async def _stored_at(self) -> float:
        """Unix time at which the server stored the card."""
        bucket = self._bus.subjects.instances_bucket
        key = self._bus.subjects.lease_key(self.card.role, self.card.instance)
        subject = f"$KV.{bucket}.{key}"
        with contextlib.suppress(NotFound):
            if stored := (await self._bus.js.get_msg(f"KV_{bucket}", subject=subject)).time:
                return stored.timestamp()
        return self.card.started

    async def update(self, card: Instance) -> None:
        """Replace the card at once, for example to announce draining; not after `close`."""
        self.card = card
        if not self._closed:
            await self._renew()

    async def close(self) -> None:
        """Delete the card, so that watchers see the process leave now, not after the TTL."""
        self._closed = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(2):
                await forget_instance(self._bus, self.card)
        except (BusError, TimeoutError) as error:
            log.warning("could not delete the lease; it will expire: %s", cause(error))

    async def _renew(self) -> None:
        async with self._renewing:
            bucket = await _bucket(self._bus)
            key = self._bus.subjects.lease_key(self.card.role, self.card.instance)
            try:
                if self._revision is not None:
                    data = encode(self.card)
                    self._revision = await bucket.update(key, data, last=self._revision)
                    return
            except Conflict:
                if (
                    not await _exists(bucket, key)
                    and self._bucket_created == self._duration.bucket_created
                ):
                    log.warning("the lease had ended: other processes considered this one dead")
                    self._lapsed()
            self._revision = await bucket.put(key, encode(self.card))
            self._bucket_created = self._duration.bucket_created

    async def _renew_until_closed(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(self._duration.seconds / 3)
            try:
                async with asyncio.timeout(self._duration.seconds):
                    await self._duration.refresh()
                    await self._renew()
                failing = False
            except (BusError, TimeoutError) as error:
                if not failing:
                    log.warning("cannot renew the lease, retrying: %s", cause(error))
                failing = True
                await self._restore_buckets()

    async def _restore_buckets(self) -> None:
        """Recreate the bucket: it is in the server's memory, which a restart loses."""
        if not self._bus.connected:
            return
        try:
            await ensure_streams(self._bus, self._limits)
        except BusError as error:
            log.debug("streams not restored yet: %s", error)


async def forget_instance(bus: Bus, card: Instance) -> None:
    """Delete a lease: this process's own on exit, or that of a process found dead."""
    bucket = await _bucket(bus)
    await bucket.delete(bus.subjects.lease_key(card.role, card.instance))


async def _bucket(bus: Bus) -> Bucket:
    bucket = bus.buckets.get(bus.subjects.instances_bucket)
    if bucket is None:
        bucket = await bus.js.key_value(bus.subjects.instances_bucket)
        bus.buckets[bus.subjects.instances_bucket] = bucket
    return bucket


async def _exists(bucket: Bucket, key: str) -> bool:
    try:
        return bool((await bucket.get(key)).value)
    except NotFound:
        return False


class Directory:
    """The live cards, optionally of one role; each change calls `joined` or `left`.

    A changed card of a known instance calls `joined` again. A card that is not renewed leaves after
    the TTL even if the server's own notice is lost, but not because of an outage of this process.
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
        self._cards: dict[str, Instance] = {}
        self._prefix = f"$KV.{bus.subjects.instances_bucket}."
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
    def lease_s(self) -> float:
        """Seconds that a lease lasts without renewal."""
        return self._duration.seconds

    async def open(self) -> None:
        """Watch; return once every card that exists now is known."""
        await self._duration.refresh()
        await self._reader.open()
        with bus_errors():
            async with asyncio.timeout(OPEN_S):
                await self._reader.caught_up.wait()
        self._task = asyncio.create_task(self._expire(), name="directory")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._reader.close()

    def _on_message(self, message: StreamMessage) -> None:
        key = message.subject.removeprefix(self._prefix)
        if not message.data:
            self._drop(key)
            return
        try:
            card = _card_decoder.decode(message.data)
        except msgspec.MsgspecError as error:
            if self._log_once.first(key, reason := str(error)):
                log.warning("ignored an unreadable card at %s: %s", key, reason)
            return
        own = self._bus.subjects.lease_key(card.role, card.instance)
        if key != own or name_of(card.instance) != card.name:
            # a process may be permitted to write its own key only
            owner = (card.role, card.name, card.instance)
            if self._log_once.first(key, *owner):
                log.warning("ignored the card of %s %s, instance %s, at %s", *owner, key)
            return
        self._renewed_at[key] = asyncio.get_running_loop().time()
        if self._cards.get(key) != card:
            self._cards[key] = card
            self._joined(card)

    def _drop(self, key: str) -> None:
        self._renewed_at.pop(key, None)
        card = self._cards.pop(key, None)
        if card is not None:
            self._left(card)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            limit_s = self.lease_s * 1.5
            if self._bus.connected_for < limit_s:
                continue
            try:
                async with asyncio.timeout(self.lease_s):
                    await self._duration.refresh()
            except (BusError, TimeoutError) as error:
                log.debug("assuming leases of %g s: %s", self.lease_s, error)
                continue
            now = asyncio.get_running_loop().time()
            for key in [k for k, seen in self._renewed_at.items() if now - seen > limit_s]:
                self._drop(key)
