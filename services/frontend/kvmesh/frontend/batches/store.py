"""Batches, files and results, shared by all frontends.

A bucket has the batches and the descriptions of files, by tenant; an object store has the bytes:
files, and of a running batch its results so far, in numbered records. A record is stored once: a
frontend that finds its next number taken has been replaced. Both keep what they have for
`files_ttl_s`.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from typing import TypeVar

import msgspec
import zstandard
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, Conflict, NotFound, StorageFull, cause
from kvmesh.bus.storage.buckets import expiring_bucket, read_bucket, read_messages
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.stored_object import StoredObject
from kvmesh.bus.streams.configuration import ensure_stream, object_store
from kvmesh.bus.streams.keeper import remake
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.frontend.auth.bucket_quota import owner_of
from kvmesh.frontend.batches.batch import Outcome, StoredBatch
from kvmesh.frontend.batches.forms import StoredFile
from kvmesh.frontend.batches.spool import Spool
from kvmesh.frontend.errors import ApiError, Unavailable
from kvmesh.settings.schema import FrontendSettings

T = TypeVar("T")
MAX_DESCRIPTIONS = 64 << 20  # bytes of the bucket
TENANT_SHARE = 0.25
ACCESS_S = 10.0
BATCH, FILE, RUNNING = "batch", "file", "running"
LISTED = ("batch", "batch_output")  # purposes of the files that their tenant may list
REQUESTS, RESULTS = "requests", "results"  # of a batch of messages
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_files = msgspec.msgpack.Decoder(StoredFile)
_batches = msgspec.msgpack.Decoder(StoredBatch)


class LineRecord(Struct, frozen=True, array_like=True):
    """The result of one request, with the tokens that it took."""

    number: int
    outcome: Outcome
    line: bytes
    tokens: tuple[int, int, int, int] = (0, 0, 0, 0)


_records = msgspec.msgpack.Decoder(list[LineRecord])


class BatchNotFound(ApiError):
    """The batch or file does not exist, has expired, or belongs to another tenant."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__("not_found", f"No such {kind}: '{name[:64]}'.", param="id")


class BatchStore:
    """Reads and writes batches and files. Methods for callers raise Unavailable or other ApiErrors,
    those for the runner BusError."""

    def __init__(self, bus: Bus, settings: FrontendSettings) -> None:
        names = bus.subjects
        self._bus = bus
        self._settings = settings
        self._name = names.batches_bucket
        self._bucket = expiring_bucket(bus, self._name, settings.files_ttl_s, MAX_DESCRIPTIONS)
        self._objects = ObjectBucket(bus, names.files_bucket)
        self._spec = object_store(
            bus,
            names.files_bucket,
            settings.files_bytes,
            "frontend.files_bytes",
            settings.files_ttl_s,
        )
        remake(bus, self._spec.name)

    @property
    def now(self) -> float:
        """The Unix time of the mesh."""
        return self._bus.clock.time(time.time())

    # files

    async def add_file(self, file: StoredFile, spool: Spool) -> None:
        """Store a file; raises ApiError (413) if the tenant has too much."""
        async with self._access():
            await self._check_room(file)
        await self._put(_object(file.tenant, file.id), spool)
        async with self._access():
            await self._bucket.put(_key(FILE, file.tenant, file.id), msgspec.msgpack.encode(file))
            try:
                await self._check_room(file)
            except ApiError:
                await self._remove_file(file, file.id)
                raise

    async def file(self, file_id: str, tenant: str) -> StoredFile:
        """The description of a file that its tenant may list; raises BatchNotFound."""
        async with self._access("file", file_id):
            found = await self._bucket.get(_key(FILE, tenant, file_id))
            file = _files.decode(found.value or b"")
        gone = file.expires <= self.now or file.purpose not in LISTED
        if gone or file.tenant != tenant:
            raise BatchNotFound("file", file_id)
        return file

    async def files(self, tenant: str) -> list[StoredFile]:
        """The files of a tenant that it may list, oldest first."""
        async with self._access():
            found = _readable(_files, await self._read(FILE, tenant))
        now = self.now
        mine = [f for f in found if f.tenant == tenant and f.expires > now and f.purpose in LISTED]
        return sorted(mine, key=lambda file: (file.created, file.id))

    async def content(self, name: str, tenant: str) -> Spool:
        """The bytes of a file, or of the results of a batch; raises BatchNotFound."""
        spool = Spool()
        try:
            async with self._access("file", name, timeout_s=None):
                await self.fill(spool, name, tenant)
        except BaseException:
            spool.close()
            raise
        return spool

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file; raises ApiError (400) if a running batch needs it."""
        running = await self.running(file.tenant)
        using = [batch.id for batch in running if batch.input_file == file.id]
        if using:
            reason = f"The file '{file.id}' is the input of a batch in progress, '{using[0]}'."
            raise ApiError("invalid_request", reason, code="file_in_use")
        async with self._access():
            await self._remove_file(file, file.id)

    # batches

    async def create(self, batch: StoredBatch, requests: Spool | None = None) -> int:
        """Store a new batch, with its requests if it has no file; returns its revision.

        Raises ApiError (429) if the tenant has too many, (413) if it has too many bytes.
        """
        async with self._access():
            await self._check_number(batch)
        if requests is not None:
            await self.add_file(described(batch, batch.input_file, REQUESTS, requests), requests)
        async with self._access():
            await self._bucket.put(_key(RUNNING, batch.tenant, batch.id), b"1")
            key = _key(BATCH, batch.tenant, batch.id)
            revision = await self._bucket.create(key, msgspec.msgpack.encode(batch))
            try:
                await self._check_number(batch)
            except ApiError:
                await self.clean(batch)
                await self._bucket.delete(key)
                raise
            return revision

    async def batch(self, batch_id: str, tenant: str) -> tuple[StoredBatch, int]:
        """A batch and its revision; raises BatchNotFound."""
        async with self._access("batch", batch_id):
            found = await self._get(_key(BATCH, tenant, batch_id))
        if found[0].tenant != tenant:
            raise BatchNotFound("batch", batch_id)
        return found

    async def batches(self, tenant: str, form: str) -> list[StoredBatch]:
        """The batches of a tenant that were made through one API, latest first."""
        async with self._access():
            found = _readable(_batches, await self._read(BATCH, tenant))
        mine = [batch for batch in found if batch.tenant == tenant and batch.form == form]
        return sorted(mine, key=lambda batch: (batch.created, batch.id), reverse=True)

    async def running(self, tenant: str) -> list[StoredBatch]:
        """The batches of the owner of a tenant that have not ended."""
        async with self._access():
            keys = await read_bucket(self._bus, self._name, f"{RUNNING}.{owner_of(tenant)}.*")
            return [batch for batch, _ in await self._batches_of(keys) if not batch.ended]

    async def delete(self, batch: StoredBatch) -> None:
        """Delete a batch that has ended, and its results."""
        async with self._access():
            await self._remove_file(batch, batch.id)
            await self._bucket.delete(_key(BATCH, batch.tenant, batch.id))

    async def change(self, batch: StoredBatch, revision: int) -> int:
        """Replace a batch of that revision; raises Conflict or Unavailable."""
        async with self._access():
            return await self.replace(batch, revision)

    # for the runner

    async def all_running(self) -> list[tuple[StoredBatch, int]]:
        """The batches of all tenants that have not ended, with their revisions."""
        keys = await read_bucket(self._bus, self._name, f"{RUNNING}.>")
        found = await self._batches_of(keys)
        for batch, _ in found:
            if batch.ended:  # its frontend was killed before it had cleaned up
                await self.clean(batch)
        return [each for each in found if not each[0].ended]

    async def current(self, batch: StoredBatch) -> tuple[StoredBatch, int]:
        """The batch as it is stored, and its revision; raises NotFound."""
        return await self._get(_key(BATCH, batch.tenant, batch.id))

    async def replace(self, batch: StoredBatch, revision: int) -> int:
        """Replace a batch of that revision; raises Conflict."""
        key = _key(BATCH, batch.tenant, batch.id)
        return await self._bucket.update(key, msgspec.msgpack.encode(batch), last=revision)

    async def fill(self, spool: Spool, name: str, tenant: str) -> None:
        """Read an object into an empty spool; raises NotFound."""
        await spool.fill(self._objects, await self._objects.find(_object(tenant, name)))

    async def add_record(self, batch: StoredBatch, number: int, results: list[LineRecord]) -> None:
        """Store the record of that number; raises Conflict if it is there."""
        packed = zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(results))
        await self._objects.put(
            _object(batch.tenant, f"{batch.id}-{number}"),
            len(packed),
            lambda offset, length: packed[offset : offset + length],
        )

    async def record(self, batch: StoredBatch, number: int) -> list[LineRecord] | None:
        """The results in the record of that number; None if it is not there."""
        try:
            found = await self._objects.find(_object(batch.tenant, f"{batch.id}-{number}"))
        except NotFound:
            return None
        packed = bytearray(found.size)
        try:
            await self._objects.read(found, memoryview(packed))
        except NotFound:  # its writer did not learn that it was stored, and removed its bytes
            return []
        try:
            return _records.decode(zstandard.ZstdDecompressor().decompress(packed))
        except (msgspec.MsgspecError, zstandard.ZstdError) as error:
            raise BusError(f"a record of {batch.id} is damaged: {error}") from error

    async def put_results(self, file: StoredFile, spool: Spool) -> None:
        """Store results, in place of those that a frontend before may have stored."""
        name, before = _object(file.tenant, file.id), None
        with suppress(NotFound):
            before = await self._objects.find(name)
        await self._objects.put(name, spool.size, spool.read, before)
        await self._bucket.put(_key(FILE, file.tenant, file.id), msgspec.msgpack.encode(file))

    async def clean(self, batch: StoredBatch) -> None:
        """Remove what only the execution of a batch has needed."""
        records: list[StoredObject] = []
        with suppress(NotFound):
            while True:
                name = _object(batch.tenant, f"{batch.id}-{len(records)}")
                records.append(await self._objects.find(name))
        for record in reversed(records):  # one that is killed leaves those that the next one finds
            await self._objects.remove(record)
        if batch.form == "anthropic":
            await self._remove_file(batch, batch.input_file)
        await self._bucket.delete(_key(RUNNING, batch.tenant, batch.id))

    async def _check_number(self, batch: StoredBatch) -> None:
        """Raises ApiError (429) if the owner of a tenant has too many batches before this one.

        Frontends check again once they have stored a batch: the order of the keys in the bucket
        decides between those that are created at once.
        """
        found: dict[str, float] = {}

        def add(key: str, message: StreamMessage) -> None:
            if message.data:
                found[key] = message.time

        own = _key(RUNNING, batch.tenant, batch.id)
        keys = f"{RUNNING}.{owner_of(batch.tenant)}.*"
        await read_messages(self._bus, self._name, keys, add)
        before = list(takewhile(lambda key: key != own, found))
        stored = {each.id: each.ended for each, _ in await self._batches_of(before)}
        number = 0
        for key in before:
            # a batch without a description is about to be stored, unless its frontend was killed
            gone = self.now - found[key] > ACCESS_S
            number += not stored.get(key.rpartition(".")[2], gone)
        most = self._settings.tenant_batches
        if number >= most:
            reason = f"{most} batches are in progress already; wait for one to end or cancel one."
            raise ApiError("rate_limit", reason, code="batch_limit_exceeded", fatal=True)

    async def _batches_of(self, running: Iterable[str]) -> list[tuple[StoredBatch, int]]:
        found = []
        for key in running:
            _, owner, batch_id = key.split(".")
            # its frontend was killed before it stored it, or is newer than this one
            with suppress(NotFound, msgspec.MsgspecError):
                found.append(await self._get(f"{BATCH}.{owner}.{batch_id}"))
        return found

    async def _get(self, key: str) -> tuple[StoredBatch, int]:
        found = await self._bucket.get(key)
        return _batches.decode(found.value or b""), found.revision or 0

    async def _read(self, kind: str, tenant: str) -> Iterable[bytes]:
        return (await read_bucket(self._bus, self._name, f"{kind}.{owner_of(tenant)}.*")).values()

    async def _check_room(self, new: StoredFile) -> None:
        """Raises ApiError (413) if a file and those before it are too much for a tenant's owner.

        As for the number of batches, the order in the bucket decides between files stored at once.
        """
        await ensure_stream(self._bus, self._spec)
        found = _readable(_files, await self._read(FILE, new.tenant))
        files = list(takewhile(lambda file: file.id != new.id, found))
        used, now = sum(file.bytes for file in files), self.now
        if any(file.expires <= now for file in files):
            inputs = {batch.input_file for batch in await self.running(new.tenant)}
            for file in files:
                if file.expires <= now and file.id not in inputs:
                    await self._remove_file(file, file.id)
                    used -= file.bytes
        most = int(self._settings.files_bytes * TENANT_SHARE)
        if used + new.bytes > most:
            reason = f"The files have {used} bytes; {new.bytes} more exceed {most}."
            reason += " Delete some files."
            raise ApiError("too_large", reason, code="storage_limit_exceeded")

    async def _put(self, name: str, spool: Spool) -> None:
        async with self._access(timeout_s=None):
            await self._objects.put(name, spool.size, spool.read)

    async def _remove_file(self, of: StoredBatch | StoredFile, name: str) -> None:
        await self._remove(_object(of.tenant, name))
        await self._bucket.delete(_key(FILE, of.tenant, name))

    async def _remove(self, name: str) -> None:
        with suppress(NotFound):
            await self._objects.remove(await self._objects.find(name))

    @asynccontextmanager
    async def _access(
        self, kind: str = "", name: str = "", timeout_s: float | None = ACCESS_S
    ) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except NotFound:
            raise BatchNotFound(kind or "file", name) from None
        except Conflict:
            raise
        except StorageFull as error:
            reason = "The store of files is full."
            raise ApiError("too_large", reason, code="storage_limit_exceeded") from error
        except (BusError, TimeoutError, msgspec.MsgspecError) as error:
            raise Unavailable(f"Cannot access stored batches: {cause(error)}") from error


def _readable(decoder: msgspec.msgpack.Decoder[T], values: Iterable[bytes]) -> list[T]:
    """The values that can be decoded: newer frontends may store others."""
    found = []
    for value in values:
        with suppress(msgspec.MsgspecError):
            found.append(decoder.decode(value))
    return found


def described(
    batch: StoredBatch, name: str, purpose: str, spool: Spool, now: float = 0.0
) -> StoredFile:
    """The description of a file that belongs to a batch."""
    made = now or batch.created
    return StoredFile(
        id=name,
        tenant=batch.tenant,
        name=f"{batch.id}_{purpose}.jsonl",
        purpose=purpose,
        bytes=spool.size,
        created=made,
        expires=made + batch.output_ttl_s,
    )


def _key(kind: str, tenant: str, name: str) -> str:
    if not _ID.fullmatch(name):
        raise BatchNotFound(kind, name)
    return f"{kind}.{owner_of(tenant)}.{name}"


def _object(tenant: str, name: str) -> str:
    return f"{owner_of(tenant)}.{name}"
