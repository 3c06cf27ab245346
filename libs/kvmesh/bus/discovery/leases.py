"""Leases: a process keeps its card in the bucket of instances until it exits.

A lease is a key of the bucket, renewed three times per TTL. It ends in one of three ways: its owner
deletes it on a clean exit, another process deletes it after it found no listener on the owner's
subjects, or the server expires it. In the last two cases an owner that is still alive learns of it
at the next renewal: a process that was frozen must not continue as before.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from math import inf

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import DATED, RECORD, keep
from kvmesh.bus.errors import (
    BusError,
    Conflict,
    JetStreamError,
    NotFound,
    NotPermitted,
    StorageFull,
    cause,
)
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.messages import Instance, encode
from kvmesh.bus.promptness import LATE_S
from kvmesh.bus.streams.configuration import StreamLimits, expect_streams
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.subjects import stored_on, through
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
STATE, REFUSED_STATE = "state", "refused"  # a label of the card, and its value
RETRY_S = 0.5  # after a renewal that failed
ROOM_S = 600.0  # to wait for room; a supervisor then starts the process again
UNREAD_SHARE = 0.8  # of a lease: within it, the next renewal reaches the server in time


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

    async def refresh(self, anew: bool = False) -> None:
        """Read the TTL, `anew` or after a reconnect, maybe to another server; raises BusError."""
        if self._read_at > self._bus.connected_at and not anew:
            return
        read_at = asyncio.get_running_loop().time()
        bucket = self._bus.bucket(self._bus.subjects.instances_bucket)
        status = await self._bus.using(bucket.status)
        self.seconds = status.ttl or self._configured
        self.bucket_created = status.stream_info.created
        self._read_at = read_at
        if self.seconds != self._configured:
            log.info(
                "leases last %g s here, not the configured %g s", self.seconds, self._configured
            )


class Lease:
    """Keeps `card` in the instances bucket until closed.

    `lapsed` runs when the lease has ended meanwhile: other processes consider this one dead. A
    bucket that was lost with its server does not count. With `rejoins`, the card then gets another
    `started`, as that of a new process.
    """

    def __init__(
        self,
        bus: Bus,
        card: Instance,
        limits: StreamLimits,
        lapsed: Callable[[], None] = lambda: None,
        rejoins: bool = False,
    ) -> None:
        self._bus = bus
        expect_streams(bus, limits)
        self._keeper = keeper_of(bus)
        self._duration = LeaseDuration(bus, limits)
        self._lapsed = lapsed
        self._rejoins = rejoins
        self._renewed_at = -inf
        self._sent_at = -inf  # of the last renewal, stored or not
        self._unread = False  # its reply may be among what this process has not read
        self._revision: int | None = None
        self._bucket_created: object = None
        self._renewing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._due_now = asyncio.Event()
        self._in_vain_since: float | None = None
        self._restorer = f"the lease of {card.instance}"
        self.card = card

    @property
    def held(self) -> bool:
        """False if the lease may have ended: it has not been renewed for its duration."""
        return asyncio.get_running_loop().time() - self._renewed_at < self._duration.seconds

    async def open(self) -> None:
        """Join. `started` of the card becomes the server's time: the later of two instances counts,
        and the clocks of their machines may differ. Waits ROOM_S while the bucket is full.
        """
        await self._duration.refresh()
        await self._enter()
        await self._start_anew()
        self._bus.faults.observe(self._on_faults)
        self._bus.on_reconnect.append(self._due_now.set)
        self._keeper.restore(self._restorer, self._restore)
        self._task = asyncio.create_task(self._renew_until_closed(), name="lease")

    async def _enter(self) -> None:
        now, ends = asyncio.get_running_loop().time, 0.0
        while True:
            try:
                return await self._renew()
            except StorageFull as error:
                if not ends:
                    log.warning("cannot join the mesh yet, waiting for room: %s", cause(error))
                    ends = now() + ROOM_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._bus.stopping.wait(), RETRY_S)
                if self._bus.stopping.is_set() or now() > ends:
                    raise

    def _on_faults(self, kind: str, _: Mapping[str, str]) -> None:
        if kind == REFUSED:
            self._due_now.set()  # the card shows other refusals than there are

    async def _start_anew(self) -> None:
        started = await self._stored_at()  # `update` may have replaced the card meanwhile
        self.card = msgspec.structs.replace(self.card, started=started)
        await self._renew()

    async def _stored_at(self) -> float:
        """Unix time at which the server stored the card."""
        bucket = self._bus.subjects.instances_bucket
        key = self._bus.subjects.lease_key(self.card.role, self.card.instance)
        subject = stored_on(self._bus.subjects.instances_bucket, key)
        with contextlib.suppress(NotFound):
            if stored := (await self._bus.js.get_msg(f"KV_{bucket}", subject=subject)).time:
                return stored.timestamp()
        return self.card.started

    async def update(self, card: Instance) -> None:
        """Replace the card at once, for example to announce draining; not after `close`.

        `started` stays: it is the server's time, and others compare it.
        """
        self.card = msgspec.structs.replace(card, started=self.card.started)
        if not self._closed:
            await self._renew()

    async def close(self) -> None:
        """Delete the card, so that watchers see the process leave now, not after the TTL."""
        self._closed = True
        self._keeper.forget(self._restorer)
        task, self._task = self._task, None
        if task is None:
            return
        self._bus.faults.ignore(self._on_faults)
        self._bus.on_reconnect.remove(self._due_now.set)
        task.cancel()
        await asyncio.wait([task])
        if not self._bus.connected:
            log.warning("cannot delete the lease without NATS; it will expire")
            return
        try:
            async with asyncio.timeout(2):
                await delete_lease(self._bus, self.card)
        except (BusError, TimeoutError) as error:
            log.warning("could not delete the lease; it will expire: %s", cause(error))

    async def _renew(self) -> None:
        if await self._store() and self._rejoins:
            await self._start_anew()

    async def _restore(self) -> None:
        """Renew after a reconnect: the bucket is in the server's memory, which a restart loses."""
        if self._renewed_at < self._bus.connected_at:
            await self._renew()

    async def _store(self) -> bool:
        """Store the card; True if the lease had ended."""
        async with self._renewing:
            begun = asyncio.get_running_loop().time()
            unread = self._is_unread(begun)
            self._sent_at = begun
            ended = False
            bucket = self._bus.bucket(self._bus.subjects.instances_bucket)
            key = self._bus.subjects.lease_key(self.card.role, self.card.instance)
            try:
                data = encode(self._shown())
                if self._revision is not None:
                    if unread:
                        self._revision = await bucket.put(key, data)
                    else:
                        self._revision = await bucket.update(key, data, last=self._revision)
                    self._renewed_at, self._unread = begun, False
                    return False
            except Conflict:
                if await self._has_ended(key) and not self._was_unrenewable():
                    log.warning("the lease had ended: other processes considered this one dead")
                    ended = True
                    self._lapsed()
            if self.card.role in DATED:
                await self._record(f"{key}{RECORD}")
            self._revision = await bucket.put(key, encode(self._shown()))
            self._bucket_created = self._duration.bucket_created
            self._renewed_at = begun
            return ended

    def _is_unread(self, now: float) -> bool:
        """True if the last renewal may be stored, though its reply and revision are unread.

        A process that reads late goes on renewing on time. It has not been frozen, and the lease
        cannot have ended meanwhile, since the next renewal follows soon enough.
        """
        return (
            self._unread
            and not self._rejoins
            and self._bus.connected_at < self._sent_at
            and now - self._sent_at < UNREAD_SHARE * self._duration.seconds
        )

    async def _record(self, key: str) -> None:
        """Store the record of this process's age, unless it is there and only the lease is lost."""
        try:
            await self._bus.bucket(self._bus.subjects.instances_bucket).get(key)
        except NotFound:
            await self._keep(key)

    async def _keep(self, key: str) -> None:
        try:
            await keep(self._bus, key, b"")
        except JetStreamError as error:  # a bucket of an earlier release may know no such TTL
            log.debug("no new record at %s: %s", key, cause(error))

    def _shown(self) -> Instance:
        """The card, which gets no work while the server refuses a subject of this process.

        `draining` tells older readers as well.
        """
        refused = self._bus.faults.texts(REFUSED)
        if not refused:
            return self.card
        return msgspec.structs.replace(
            self.card,
            draining=True,
            labels={**self.card.labels, STATE: REFUSED_STATE},
            warnings=list(dict.fromkeys([*refused, *self.card.warnings])),
        )

    def _was_unrenewable(self) -> bool:
        """True if the lease could only end: JetStream took no renewal of this connected process.

        A cluster without quorum stores nothing, and then all leases end together: directories keep
        the cards for a while (`Directory`). Not so with `rejoins`: a leader must not resume.
        """
        since = self._in_vain_since
        return (
            not self._rejoins
            and since is not None
            and since - self._renewed_at < self._duration.seconds
        )

    async def _has_ended(self, key: str) -> bool:
        """False if the lease is there, or was lost with its bucket or by a purge of that."""
        subjects, held = self._bus.subjects, self.held
        await self._duration.refresh(anew=True)
        if self._bucket_created != self._duration.bucket_created:
            return False
        try:
            stream, subject = (
                f"KV_{subjects.instances_bucket}",
                stored_on(subjects.instances_bucket, key),
            )
            found = await self._bus.js.get_msg(stream, subject=subject)
        except NotFound:
            return not held  # else the server has not expired it, and a deletion leaves a marker
        return not found.data

    async def _renew_until_closed(self) -> None:
        loop, failing, logged = asyncio.get_running_loop(), False, False
        while True:
            slept_at = loop.time()
            await self._due(RETRY_S if failing else self._duration.seconds / 3)
            if not self._bus.connected:
                self._in_vain_since = None
                continue
            patience_s = self._duration.seconds / 4
            ends = loop.time() + patience_s
            # before the end, so that a process that reads late knows by then that it does
            checking = loop.call_at(ends - patience_s / 2, self._bus.promptness.check)
            try:
                async with asyncio.timeout_at(ends):
                    await self._duration.refresh()
                    await self._renew()
                failing, logged, self._in_vain_since = False, False, None
            except (BusError, TimeoutError) as error:
                if isinstance(error, NotPermitted):
                    self._say_unheard()
                self._unread = self._bus.promptness.late or loop.time() - ends > LATE_S
                if not logged and not self._unread:
                    logged = True
                    log.warning("cannot renew the lease, retrying: %s", cause(error))
                failing = True
                self._note_failure(loop.time(), slept_at)
            finally:
                checking.cancel()

    def _say_unheard(self) -> None:
        """Store the card without an acknowledgement: the server may refuse only this inbox."""
        key = self._bus.subjects.lease_key(self.card.role, self.card.instance)
        subject = through(
            self._bus.options.api_prefix, stored_on(self._bus.subjects.instances_bucket, key)
        )
        self._bus.post(subject, self._shown())

    async def _due(self, wait_s: float) -> None:
        """Return within `wait_s` seconds, soon after a reconnect, or for a fault on the card.

        A process that has reconnected answers what waits for it first. Otherwise the processes of a
        machine renew at the same time, so that they wake the readers together.
        """
        await next_tick(wait_s, self._due_now)
        if self._due_now.is_set():
            await asyncio.sleep(random.uniform(RETRY_S / 5, RETRY_S))
            self._due_now.clear()

    def _note_failure(self, now: float, slept_at: float) -> None:
        """A renewal has failed; after a time in which this process did not run, the first one."""
        since, ran = self._in_vain_since, now - slept_at < self._duration.seconds
        if not self._bus.connected or not ran:
            self._in_vain_since = None
        elif since is None:
            self._in_vain_since = now


async def delete_lease(bus: Bus, card: Instance) -> None:
    """Delete a lease: this process's own on exit, or that of a process found dead."""
    key = bus.subjects.lease_key(card.role, card.instance)
    bucket = bus.bucket(bus.subjects.instances_bucket)
    await bucket.delete(key)
    if card.role in DATED:
        await bucket.delete(f"{key}{RECORD}")
