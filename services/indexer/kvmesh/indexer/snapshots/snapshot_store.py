"""Snapshots in the object store: a few slots per shard, overwritten in turn."""

import asyncio
import base64
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound, ObjectUnreadable
from kvmesh.bus.reader import Start, StreamMessage, StreamReader
from kvmesh.indexer.snapshots.snapshot import DamagedSnapshot

SLOTS = 3
READ_TIMEOUT_S = 120.0
COVERED = "covered"
STORED = "stored"
MADE = "stream"
VERSION = "version"


class Slot(NamedTuple):
    """A stored snapshot: the stream sequence it covers, and where its bytes are.

    `stored` is when that message was stored (0 if it is not told), `made` when the stream was made.
    """

    name: str
    covered: int
    nuid: str
    size: int
    stored: float = 0.0
    made: str = ""


class Covers(NamedTuple):
    """The extent of a snapshot: all messages of one stream up to a sequence, stored at a time."""

    made: str
    seq: int
    stored: float


class SnapshotStore:
    """The snapshots of every shard; `label` tells which."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.subjects.index_bucket
        self._stream = f"OBJ_{self._bucket}"
        self._unclaimed: dict[str, int] = {}

    async def slots(self, label: str) -> list[Slot]:
        """What is stored for one shard, newest first."""
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
        headers = info.headers or {}
        covered, stored = int(_number(headers, COVERED, -1)), _number(headers, STORED, 0)
        made = str(headers.get(MADE, ""))
        return Slot(name, covered, info.nuid or "", info.size or 0, stored, made)

    async def read(self, slot: Slot) -> bytes:
        """The bytes of a snapshot; raises DamagedSnapshot if some are missing.

        Chunks are taken straight from the bucket's stream: several times faster than the object
        store's own `get`, which hands over chunk by chunk and hashes in between.
        """
        if not slot.nuid:
            raise DamagedSnapshot("its description cannot be read")
        chunks: list[bytes] = []
        arrived = 0
        complete = asyncio.Event()

        def take(message: StreamMessage) -> None:
            nonlocal arrived
            chunks.append(message.data)
            arrived += len(message.data)
            if arrived >= slot.size or not message.pending:
                complete.set()

        subject = f"$O.{self._bucket}.C.{slot.nuid}"
        reader = StreamReader(self._bus, self._stream, subject, take, Start())
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await reader.open()
                if reader.pending:
                    await complete.wait()
        finally:
            await reader.close()
        if arrived != slot.size:
            raise DamagedSnapshot(f"{arrived} of {slot.size} bytes are there")
        return b"".join(chunks)

    async def write(self, label: str, data: bytes, covers: Covers, version: int) -> None:
        """Store a snapshot in place of the oldest of its shard."""
        taken = await self.slots(label)
        free = sorted({f"{label}.{i}" for i in range(SLOTS)} - {slot.name for slot in taken})
        name = free[0] if free else taken[-1].name
        bucket = await self._bus.js.object_store(self._bucket)
        headers = {
            COVERED: str(covers.seq),
            STORED: repr(covers.stored),
            MADE: covers.made,
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
        """Purge chunks that no object has claimed in two sweeps: their writer died half-way."""
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
    """With a `covered` of -1 a slot is the first to be overwritten and the last to be read."""
    with contextlib.suppress(TypeError, ValueError):
        return float(headers.get(name, default))
    return default
