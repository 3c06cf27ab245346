"""Push of a model folder into the model store of a mesh."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    Conflict,
    JetStreamUnavailable,
    NotConnected,
    NotFound,
    StorageFull,
)
from kvmesh.bus.storage.stored_object import StoredObject
from kvmesh.bus.streams.configuration import StreamLimits, ensure_model_store
from kvmesh.runtime.quantities import size
from kvmesh.weights.errors import CheckpointError, ModelStoreError, WeightsError
from kvmesh.weights.models.catalog import ModelCatalog, ModelEntry
from kvmesh.weights.models.folder import FolderContent
from kvmesh.weights.models.store import ModelStore, chunk_names, manifest_name
from kvmesh.weights.process.manifests import ManifestStore, mesh_key

AT_ONCE = 8  # chunks
ROUNDS = 6  # in which others remove what this push uses, or the server does not answer
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 8.0
TRANSIENT = (BusTimeout, NotConnected, JetStreamUnavailable)
SPARE = 1.02  # descriptions and the stream's own bytes
RAISE = "evict a model, or raise streams.models_bytes with `kvmesh config streams`"


class BytesSource:
    """The bytes of an object that are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def read(self, at: int, count: int) -> bytes:
        return self._data[at : at + count]

    def check(self) -> None: ...


class FileSource:
    """The bytes of a chunk in a file, verified when they have been read."""

    def __init__(self, path: Path, offset: int, digest: str) -> None:
        self._path = path
        self._offset = offset
        self._expected = digest
        self._digest = blake3()
        self._file = -1

    def __str__(self) -> str:
        return str(self._path)

    def __enter__(self) -> None:
        """Raises OSError."""
        self._digest = blake3()
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, at: int, count: int) -> bytes:
        data = os.pread(self._file, count, self._offset + at)
        self._digest.update(data)
        return data

    def check(self) -> None:
        """Raises CheckpointError unless the bytes are those of the digest."""
        if self._digest.hexdigest() != self._expected:
            raise CheckpointError(f"{self._path} changes while it is read")


ObjectSource: TypeAlias = BytesSource | FileSource


@dataclass
class PushReport:
    """Bytes and chunks that were sent, and those that were in the store before."""

    entry: ModelEntry
    sent_bytes: int = 0
    kept_bytes: int = 0
    sent: int = 0
    kept: int = 0
    progress: Callable[[int, int], None] = field(default=lambda _done, _total: None, repr=False)


class ModelPush:
    """Sends one folder under a name; one that was broken off goes on where it was."""

    def __init__(self, bus: Bus, folder: Path, content: FolderContent, name: str) -> None:
        self._bus = bus
        self._folder = folder
        self._manifest = content.folder
        self._weights = content.weights
        self._store = ModelStore(bus)
        self._catalog = ModelCatalog(bus)
        manifest = self._manifest
        self._chunks = dict(zip(chunk_names(manifest), manifest.chunks, strict=True))
        self.report = PushReport(
            ModelEntry(
                name=name,
                digest=manifest.digest,
                weights=content.weights.digest if content.weights is not None else "",
                size=manifest.size,
                chunks=len(manifest.chunks),
                created=time.time(),
                weights_bytes=content.weights.size if content.weights is not None else 0,
            )
        )

    async def run(self, limits: StreamLimits) -> PushReport:
        """Return once the entry is complete. Raises ModelStoreError or BusError.

        A failure leaves an incomplete entry, which another push completes, and harms no other.
        """
        try:
            await ensure_model_store(self._bus, limits)
            await self._require_room()
            if self._weights is not None:
                await ManifestStore(self._bus).put(self._weights)
            entry, version = await self._catalog.begin(self.report.entry)
            for _ in range(ROUNDS):
                await self._send_missing()
                present = await self._store.objects.complete()
                names = [manifest_name(self._manifest.digest), *self._chunks]
                if all(name in present for name in names):
                    break
            else:
                raise ModelStoreError("other processes remove chunks of this model: push it again")
            if not entry.complete:
                await self._finish(version)
        except StorageFull as error:
            used, most = await self._store.objects.usage()
            reason = f"the model store is full, with {size(used)} of {size(most)}: {RAISE}"
            raise ModelStoreError(reason) from error
        return self.report

    async def _finish(self, version: int) -> None:
        try:
            await self._catalog.finish(self.report.entry, version)
        except (Conflict, NotFound) as error:
            raise ModelStoreError(f"{self.report.entry.reference} was evicted meanwhile") from error

    async def _require_room(self) -> None:
        """Refuse at once what cannot fit."""
        used, most = await self._store.objects.usage()
        if most < 0:
            return
        present = await self._store.objects.complete()
        missing = sum(c.size for name, c in self._chunks.items() if name not in present)
        if used + missing * SPARE > most:
            raise ModelStoreError(
                f"{size(missing)} do not fit into the model store, which has {size(used)} of"
                f" {size(most)}: {RAISE}"
            )

    async def _send_missing(self) -> None:
        """Send what is missing, and give what is there a new version; the manifest comes first."""
        present = await self._store.objects.complete()
        packed = self._manifest.pack(await mesh_key(self._bus))
        name = manifest_name(self._manifest.digest)
        await self._have(name, len(packed), present.get(name), BytesSource(packed))
        work = list(self._chunks)[::-1]

        async def worker() -> None:
            while work:
                await self._send(name := work.pop(), present.get(name))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(worker())
        except* (BusError, WeightsError) as errors:
            raise _first(errors) from errors

    async def _send(self, name: str, known: StoredObject | None) -> None:
        report, (index, offset, count) = self.report, self._chunks[name]
        path = self._folder / self._manifest.files[index].name
        if await self._have(name, count, known, FileSource(path, offset, name)):
            report.sent += 1
            report.sent_bytes += count
        else:
            report.kept += 1
            report.kept_bytes += count
        report.progress(report.sent_bytes + report.kept_bytes, self._manifest.size)

    async def _have(
        self,
        name: str,
        count: int,
        known: StoredObject | None,
        source: ObjectSource,
    ) -> bool:
        """Have an object in the store, with a new version; returns whether it was sent.

        `known` is a complete one that was there a moment ago.
        """
        damaged, backoff = known is None, Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        for attempt in range(ROUNDS):
            try:
                found = await self._found(name)
                if found is not None and not damaged:
                    await self._store.objects.touch(found)
                    return False
                with source:
                    await self._store.objects.put(name, count, source.read, found, source.check)
                return True
            except (Conflict, NotFound):  # another push has sent it, or an eviction removed it
                damaged = False
            except TRANSIENT:
                if attempt == ROUNDS - 1:
                    raise
                await asyncio.sleep(backoff.delay())
            except OSError as error:
                raise CheckpointError(f"cannot read {source}: {error.strerror}") from error
        raise ModelStoreError(f"other processes change {name[:12]}: push again")

    async def _found(self, name: str) -> StoredObject | None:
        try:
            return await self._store.objects.find(name)
        except NotFound:
            return None


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The first of several errors of one kind of cause."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        full = error.subgroup(StorageFull)
        error = (full or error).exceptions[0]
    return error


def pushed_text(report: PushReport) -> str:
    """One line about a push."""
    entry = report.entry
    kept = f", {size(report.kept_bytes)} were there" if report.kept else ""
    lacking = "" if entry.weights else ", without weights"
    return f"pushed {entry.reference}: {size(report.sent_bytes)} sent{kept}{lacking}"
