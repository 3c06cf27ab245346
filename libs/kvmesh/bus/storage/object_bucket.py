"""Objects of a JetStream object store that are replaced and removed conditionally.

The layout is that of JetStream's object stores (ADR-20), so its other clients read the objects. An
object is a description, whose sequence in the stream is its version, and parts under a random
name of their own. Each change names the version that it expects, so that processes need no locks:
also one that was frozen for an hour does no harm.
"""

import asyncio
import base64
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256

import msgspec
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.translation import bus_errors
from kvmesh.bus.errors import BusError, BusTimeout, JetStreamError, NotFound, ObjectUnreadable
from kvmesh.bus.storage.stored_object import (
    ObjectDescription,
    StoredObject,
    decoded,
    described,
)
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

log = logging.getLogger(__name__)
PART_BYTES = 512 << 10
PUT_S = 600.0  # for one object
ABANDONED_S = 3600.0  # after which parts without an object are those of a dead process
READ_S = 30.0  # without a part
LIST_S = 60.0
API_S = 10.0
NO_SEQUENCE = 10043  # JetStream's error code "sequence not found"
LAST = "Nats-Expected-Last-Subject-Sequence"
ROLLUP = {"Nats-Rollup": "sub"}


class _State(Struct):
    subjects: dict[str, int] | None = None


class _Info(Struct):
    state: _State | None = None
    total: int = 0
    error: dict[str, object] | None = None


_infos = msgspec.json.Decoder(_Info)


class ObjectBucket:
    """The objects of one bucket. Every method raises BusError."""

    def __init__(self, bus: Bus, bucket: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    async def usage(self) -> tuple[int, int]:
        """The bytes in the bucket, and the most that it may hold; below 0: no bound."""
        info = await self._bus.js.stream_info(self._stream)
        return info.state.bytes, info.config.max_bytes or -1

    async def find(self, name: str) -> StoredObject:
        """An object; raises NotFound."""
        found = await self._bus.js.get_msg(self._stream, subject=self._described(name))
        stored = found.time.timestamp() if found.time is not None else 0.0
        obj = described(found.data or b"", found.seq or 0, stored)
        if obj is None:
            raise NotFound(f"there is no object {name}")
        return obj

    async def complete_version(self, name: str) -> int:
        """The version of an object if all its parts are there, else 0."""
        try:
            obj = await self.find(name)
        except NotFound:
            return 0
        complete = (await self._parts(obj.nuid)).get(obj.nuid, 0) == obj.parts
        return obj.version if complete else 0

    async def complete(self) -> dict[str, StoredObject]:
        """All objects whose parts are there, by name."""
        found: dict[str, StoredObject] = {}
        prefix = f"$O.{self._bucket}.M."

        def add(message: StreamMessage) -> None:
            obj = described(message.data, message.seq, message.time)
            if obj is not None:
                found[obj.name] = obj

        reader = StreamReader(
            self._bus, self._stream, f"{prefix}>", add, Start(last_per_subject=True)
        )
        await reader.open()
        try:
            await reader.until_caught_up(LIST_S)
        finally:
            await reader.close()
        parts = await self._parts()
        return {name: obj for name, obj in found.items() if parts.get(obj.nuid, 0) == obj.parts}

    async def put(
        self,
        name: str,
        size: int,
        read: Callable[[int, int], bytes],
        replaces: StoredObject | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> StoredObject:
        """Store an object in place of the one that it `replaces`; None: where there is none.

        `read` returns the bytes at an offset, of a length; it blocks. `check` raises if what was
        read is wrong. Raises Conflict if another process was first, or StorageFull.
        """
        nuid, digest, parts = secrets.token_hex(11), sha256(), 0
        part_bytes = min(PART_BYTES, self._bus.max_payload // 2)
        ends = time.monotonic() + PUT_S
        subject = f"$O.{self._bucket}.C.{nuid}"

        def part(offset: int) -> bytes:
            data = read(offset, min(part_bytes, size - offset))
            digest.update(data)
            return data

        try:
            for offset in range(0, size, part_bytes):
                data = await asyncio.to_thread(part, offset)
                await self._bus.store(subject, data, API_S)
                parts += 1
            check()
            if time.monotonic() > ends:  # others may take the parts for abandoned ones
                raise BusTimeout(f"{name} took more than {PUT_S:g} s")
            encoded = base64.urlsafe_b64encode(digest.digest()).decode()
            description = ObjectDescription(
                name=name,
                bucket=self._bucket,
                nuid=nuid,
                size=size,
                chunks=parts,
                mtime=datetime.now(UTC).isoformat(),
                digest=f"SHA-256={encoded}",
                options={"max_chunk_size": part_bytes},
            )
            stored = await self._describe(description, replaces.version if replaces else 0)
        except BaseException:
            await self._discard(nuid)
            raise
        if replaces is not None:
            await self._discard(replaces.nuid)
        return stored

    async def touch(self, obj: StoredObject) -> StoredObject:
        """Give an object a new version; raises Conflict if it has another one by now."""
        found = await self._bus.js.get_msg(self._stream, seq=obj.version)
        return await self._describe(decoded(found.data or b""), obj.version)

    async def content(self, name: str, most: int) -> bytes:
        """The bytes of an object, not verified; raises NotFound, or ObjectUnreadable if it has more
        than `most`."""
        obj = await self.find(name)
        if obj.size > most:
            raise ObjectUnreadable(f"{name} has {obj.size} bytes, more than {most}")
        data = bytearray(obj.size)
        await self.read(obj, memoryview(data))
        return bytes(data)

    async def read(self, obj: StoredObject, target: memoryview) -> None:
        """Fill `target` with the bytes of an object, which the caller verifies."""
        if len(target) != obj.size:
            raise ObjectUnreadable(f"{obj.name} has {obj.size} bytes, not {len(target)}")
        at, parts, moved, done = 0, 0, asyncio.Event(), asyncio.Event()
        closing = False

        def receive(message: StreamMessage) -> None:
            nonlocal at, parts
            if closing:
                return
            end = at + len(message.data)
            if end <= len(target):
                target[at:end] = message.data
            at, parts = end, parts + 1
            moved.set()
            if parts >= obj.parts:
                done.set()

        subject = f"$O.{self._bucket}.C.{obj.nuid}"
        reader = StreamReader(self._bus, self._stream, subject, receive, Start())
        await reader.open()
        try:
            while not done.is_set():
                if reader.caught_up.is_set() and parts < obj.parts:
                    raise NotFound(f"{obj.name} was removed")
                with bus_errors():
                    async with asyncio.timeout(READ_S):
                        await moved.wait()
                moved.clear()
        finally:
            closing = True  # a second cancellation may end `close`: the target is not ours any more
            await reader.close()
        if at != obj.size:
            raise ObjectUnreadable(f"{obj.name} has {at} bytes, not {obj.size}")

    async def remove(self, obj: StoredObject) -> bool:
        """Remove an object unless it has another version by now; returns whether it did.

        It needs no room in the bucket, so also a full one can be emptied.
        """
        try:
            await self._bus.js.delete_msg(self._stream, obj.version)
        except NotFound:
            return False
        except JetStreamError as error:
            if error.err_code == NO_SEQUENCE:
                return False
            raise
        await self._purge(obj.nuid)
        return True

    async def remove_abandoned(self, live: Sequence[StoredObject]) -> int:
        """Remove the parts of processes that died before they described them; their number.

        `live` are the objects, read before.
        """
        removed = 0
        for nuid in (await self._parts()).keys() - {obj.nuid for obj in live}:
            subject = f"$O.{self._bucket}.C.{nuid}"
            try:
                last = await self._bus.js.get_msg(self._stream, subject=subject)
            except NotFound:
                continue
            if last.time is not None and time.time() - last.time.timestamp() > ABANDONED_S:
                await self._purge(nuid)
                removed += 1
        return removed

    async def _parts(self, of: str = ">") -> dict[str, int]:
        """The number of parts under each random name, or under one."""
        prefix = f"$O.{self._bucket}.C."
        found: dict[str, int] = {}
        while True:
            query = json.dumps({"subjects_filter": f"{prefix}{of}", "offset": len(found)})
            call = f"{self._bus.js.prefix}.STREAM.INFO.{self._stream}"
            with bus_errors(call):
                reply = await self._bus.client.request(call, query.encode(), timeout=API_S)
            try:
                info = _infos.decode(reply.data)
            except msgspec.MsgspecError as error:
                raise ObjectUnreadable(f"{self._stream} cannot be listed: {error}") from error
            if info.error is not None or info.state is None:
                raise ObjectUnreadable(f"{self._stream} cannot be listed: {info.error}")
            page = info.state.subjects or {}
            found |= {subject.removeprefix(prefix): n for subject, n in page.items()}
            if not page or len(found) >= info.total:
                return found

    async def _describe(self, description: ObjectDescription, version: int) -> StoredObject:
        ack = await self._bus.js.publish(
            self._described(description.name),
            msgspec.json.encode(description),
            timeout=API_S,
            headers={**ROLLUP, LAST: str(version)},
        )
        d = description
        return StoredObject(d.name, d.nuid, d.size, d.chunks, ack.seq, time.time())

    def _described(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def _discard(self, nuid: str) -> None:
        try:
            async with asyncio.timeout(API_S):
                await self._purge(nuid)
        except (BusError, TimeoutError) as error:  # another process takes them for abandoned later
            log.debug("parts %s stay for now: %s", nuid, error)

    async def _purge(self, nuid: str) -> None:
        await self._bus.js.purge_stream(self._stream, subject=f"$O.{self._bucket}.C.{nuid}")
