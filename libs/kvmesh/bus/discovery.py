"""Who is on the mesh: each process holds a lease on a card; everyone may watch the cards.

A lease is a key of the instances bucket, renewed three times per TTL. It ends in one of three
ways: deleted by its owner on a clean exit, deleted by whoever found that nobody listens on the
owner's subjects any more, or expired by the server. In the last two, an owner that lives after all
learns of it as it renews: whoever has been frozen must not go on as if nothing had happened.
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
STATE = "state"  # the label that says how far a process is, if it has to catch up first
READY = "ready"
OPEN_S = 10.0
_card_decoder = msgspec.msgpack.Decoder(Instance)


class Term:
    """How long a lease lasts without renewal: as the bucket says, not as this process is set.

    Processes that are set differently would otherwise see each other leave and return for ever.
    """

    def __init__(self, bus: Bus, limits: StreamLimits) -> None:
        self._bus = bus
        self._set_to = limits.lease_s
        self._read_at = -1.0
        self.made: object = None
        self.seconds = limits.lease_s

    async def refresh(self) -> None:
        """Read it again if the server may be another one; raises BusError."""
        if self._read_at > self._bus.connected_at:
            return
        read_at = asyncio.get_running_loop().time()
        status = await (await _bucket(self._bus)).status()
        self.seconds = status.ttl or self._set_to
        self.made = status.stream_info.created
        self._read_at = read_at
        if self.seconds != self._set_to:
            log.info("leases last %g s here, not the %g s set", self.seconds, self._set_to)


def routable(card: Instance) -> bool:
    """Whether a process does its work now, as far as its card says."""
    return not card.draining and card.labels.get(STATE, READY) == READY


class Lease:
    """Keeps `card` in the instances bucket until closed.

    `lapsed` is called when it turns out to have ended meanwhile: others have taken this process
    for dead. A bucket that was lost with its server is no such end.
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
        self._term = Term(bus, limits)
        self._lapsed = lapsed
        self._revision: int | None = None
        self._bucket_made: object = None
        self._renewing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.card = card

    async def open(self) -> None:
        """Join. The card's `started` becomes the server's time: of two lives the later one counts,
        and the clocks of their machines may differ.
        """
        await self._term.refresh()
        await self._renew()
        self.card = msgspec.structs.replace(self.card, started=await self._joined())
        await self._renew()
        self._task = asyncio.create_task(self._keep(), name="lease")

    async def _joined(self) -> float:
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
        """Withdraw the card, so that watchers see the leave now instead of after the TTL."""
        self._closed = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(2):
                await forget_instance(self._bus, self.card)
        except (BusError, TimeoutError) as error:
            log.warning("could not withdraw the lease; it will lapse: %s", cause(error))

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
                if not await _is_there(bucket, key) and self._bucket_made == self._term.made:
                    log.warning("the lease had ended: others took this process for dead")
                    self._lapsed()
            self._revision = await bucket.put(key, encode(self.card))
            self._bucket_made = self._term.made

    async def _keep(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(self._term.seconds / 3)
            try:
                async with asyncio.timeout(self._term.seconds):
                    await self._term.refresh()
                    await self._renew()
                failing = False
            except (BusError, TimeoutError) as error:
                if not failing:
                    log.warning("cannot renew the lease, retrying: %s", cause(error))
                failing = True
                await self._restore_buckets()

    async def _restore_buckets(self) -> None:
        """The bucket lives in server memory: a restarted server has forgotten it."""
        if not self._bus.connected:
            return
        try:
            await ensure_streams(self._bus, self._limits)
        except BusError as error:
            log.debug("streams not restored yet: %s", error)


async def forget_instance(bus: Bus, card: Instance) -> None:
    """Delete a lease: one's own on exit, or that of a process found dead."""
    bucket = await _bucket(bus)
    await bucket.delete(bus.subjects.lease_key(card.role, card.instance))


async def _bucket(bus: Bus) -> Bucket:
    bucket = bus.buckets.get(bus.subjects.instances_bucket)
    if bucket is None:
        bucket = await bus.js.key_value(bus.subjects.instances_bucket)
        bus.buckets[bus.subjects.instances_bucket] = bucket
    return bucket


async def _is_there(bucket: Bucket, key: str) -> bool:
    try:
        return bool((await bucket.get(key)).value)
    except NotFound:
        return False


class Directory:
    """The live cards, of one role if told, kept current; each change calls `joined` or `left`.

    A changed card of a known instance is a `joined` again. Entries that are not renewed leave
    after the TTL even if the server's own notice is lost, but never because of an outage here.
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
        self._term = Term(bus, limits)
        self._joined = joined
        self._left = left
        self._told = LogOnce()  # a card that is refused comes again as often as it is renewed
        self._seen: dict[str, float] = {}
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
        """How long a lease lasts without renewal, in seconds."""
        return self._term.seconds

    async def open(self) -> None:
        """Watch, and return once every card that exists now is known."""
        await self._term.refresh()
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
            if self._told.first(key, reason := str(error)):
                log.warning("ignored an unreadable card at %s: %s", key, reason)
            return
        own = self._bus.subjects.lease_key(card.role, card.instance)
        if key != own or name_of(card.instance) != card.name:
            # a process may be permitted to write its own key, and only that
            whose = (card.role, card.name, card.instance)
            if self._told.first(key, *whose):
                log.warning("ignored the card of %s %s, instance %s, at %s", *whose, key)
            return
        self._seen[key] = asyncio.get_running_loop().time()
        if self._cards.get(key) != card:
            self._cards[key] = card
            self._joined(card)

    def _drop(self, key: str) -> None:
        self._seen.pop(key, None)
        card = self._cards.pop(key, None)
        if card is not None:
            self._left(card)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            patience = self.lease_s * 1.5
            if self._bus.connected_for < patience:
                continue
            try:
                async with asyncio.timeout(self.lease_s):
                    await self._term.refresh()
            except (BusError, TimeoutError) as error:
                log.debug("leases are taken to last %g s: %s", self.lease_s, error)
                continue
            now = asyncio.get_running_loop().time()
            for key in [k for k, seen in self._seen.items() if now - seen > patience]:
                self._drop(key)
