"""Snapshots in the object store: SLOTS per shard, the oldest is overwritten."""

import asyncio
import base64
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound, ObjectUnreadable
from kvmesh.bus.storage.stored_object import PARTS_NAME
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.indexer.snapshots.snapshot import DamagedSnapshot

SLOTS = 3
READ_TIMEOUT_S = 120.0
COVERED = "covered"
STORED = "stored"
STREAM_CREATED = "stream"
VERSION = "version"


class Slot(NamedTuple):
    """A stored snapshot: the stream sequence it covers, and the location of its bytes.

    `stored` is the time at which that message was stored (0: unknown), `stream_created` the
    stream's creation time.
    """

    name: str
    covered: int
    nuid: str
    size: int
    stored: float = 0.0
    stream_created: str = ""


class Covers(NamedTuple):
    """The extent of a snapshot: a stream's messages up to `seq`, which was stored at `stored`."""

    stream_created: str
    seq: int
    stored: float


class SnapshotStore:
    """The snapshots of all shards, by the shard's label."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.subjects.index_bucket
        self._stream = f"OBJ_{self._bucket}"
        self._unclaimed: dict[str, int] = {}

    async def slots(self, label: str) -> list[Slot]:
        """The stored snapshots of one shard, newest first."""
        found = [await self._slot(f"{label}.{i}") for i in range(SLOTS)]
        return sorted((s for s in found if s is not None), key=lambda s: s.covered, reverse=True)

    async def _slot(self, name: str) -> Slot | None:
        bucket = await self._bus.js.object_store(self._bucket)
        try:
            info = await bucket.get_info(name)
        except NotFound:
            return None
        except ObjectUnreadable:
            return Slot(name, -1, "", 0)
        if not (PARTS_NAME.fullmatch(str(info.nuid)) and isinstance(info.size, int)):
            return Slot(name, -1, "", 0)
        headers = info.headers or {}
        covered, stored = int(_number(headers, COVERED, -1)), _number(headers, STORED, 0)
        created = str(headers.get(STREAM_CREATED, ""))
        return Slot(name, covered, info.nuid, info.size, stored, created)

    async def read(self, slot: Slot) -> bytes:
        """The bytes of a snapshot; raises DamagedSnapshot if some are missing.

        Chunks are read directly from the bucket's stream: several times faster than the object
        store's own `get`, which reads chunk by chunk and hashes in between.
        """
        if not slot.nuid:
            raise DamagedSnapshot("its metadata is unreadable")
        chunks: list[bytes] = []
        arrived = 0
        complete = asyncio.Event()

        def receive(message: StreamMessage) -> None:
            nonlocal arrived
            chunks.append(message.data)
            arrived += len(message.data)
            if arrived >= slot.size or not message.pending:
                complete.set()

        subject = f"$O.{self._bucket}.C.{slot.nuid}"
        reader = StreamReader(self._bus, self._stream, subject, receive, Start())
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await reader.open()
                if reader.pending:
                    await complete.wait()
        finally:
            await reader.close()
        if arrived != slot.size:
            raise DamagedSnapshot(f"{arrived} of {slot.size} bytes are stored")
        return b"".join(chunks)

    async def write(self, label: str, data: bytes, covers: Covers, version: int) -> None:
        """Store a snapshot in place of the oldest of its shard."""
        used = await self.slots(label)
        free = sorted({f"{label}.{i}" for i in range(SLOTS)} - {slot.name for slot in used})
        name = free[0] if free else used[-1].name
        bucket = await self._bus.js.object_store(self._bucket)
        headers = {
            COVERED: str(covers.seq),
            STORED: repr(covers.stored),
            STREAM_CREATED: covers.stream_created,
            VERSION: str(version),
        }
        await bucket.put(name, data, headers)

    async def drop(self, slot: Slot) -> None:
        """Remove one snapshot."""
        bucket = await self._bus.js.object_store(self._bucket)
        with contextlib.suppress(NotFound):
            await bucket.delete(slot.name)

    async def clear(self) -> None:
        """Remove every snapshot of every shard."""
        await self._bus.js.purge_stream(self._stream)

    async def sweep(self) -> None:
        """Purge chunks that have no object in two successive sweeps: their writer died."""
        objects = f"$O.{self._bucket}."
        info = await self._bus.js.stream_info(self._stream, subjects_filter=f"{objects}>")
        subjects = info.state.subjects or {}
        names = [_name(s) for s in subjects if s.startswith(f"{objects}M.")]
        slots = [await self._slot(name) for name in names]
        claimed = {f"{objects}C.{slot.nuid}" for slot in slots if slot is not None}
        unclaimed = {
            subject: count
            for subject, count in subjects.items()
            if subject.startswith(f"{objects}C.") and subject not in claimed
        }
        for subject, count in unclaimed.items():
            if self._unclaimed.get(subject) == count:
                await self._bus.js.purge_stream(self._stream, subject=subject)
        self._unclaimed = unclaimed


def _name(meta_subject: str) -> str:
    return base64.urlsafe_b64decode(meta_subject.rsplit(".", 1)[1]).decode()


def _number(headers: Mapping[str, Any], name: str, default: float) -> float:
    """A numeric header; a slot whose `covered` is the default -1 is overwritten first."""
    with contextlib.suppress(TypeError, ValueError):
        return float(headers.get(name, default))
    return default
