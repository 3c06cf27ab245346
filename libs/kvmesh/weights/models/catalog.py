"""The models that the model store of a mesh holds, by name and digest."""

import hmac
import time

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, Conflict, NotFound, cause
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.weights.errors import ModelStoreError
from kvmesh.weights.models.reference import ModelReference
from kvmesh.weights.process.manifests import mesh_key

PURPOSE = b"kvmesh model entry\0"
MAC_BYTES = 32


class ModelEntry(Struct, frozen=True):
    """One revision of a model in the store.

    `digest` is that of the manifest of the folder, `weights` that of the manifest of its weights,
    empty if it has none. `size` is in bytes, `weights_bytes` of them are weights. `created` is a
    Unix time. Only of a `complete` one all chunks are in the store.
    """

    name: str
    digest: str
    weights: str
    size: int
    chunks: int
    created: float
    complete: bool = False
    weights_bytes: int = 0

    @property
    def reference(self) -> str:
        """NAME@DIGEST with an abbreviated digest."""
        return f"{self.name}@{self.digest[:12]}"


class ModelCatalog:
    """The entries, authenticated by the key of manifests. Methods raise BusError."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def entries(self) -> list[ModelEntry]:
        """All entries, oldest first; none if the mesh has no catalog."""
        try:
            found = await read_bucket(self._bus, self._bus.subjects.catalog_bucket)
        except NotFound:
            return []
        key = await mesh_key(self._bus) if found else b""
        entries = [_decode(data, key) for data in found.values()]
        return sorted((e for e in entries if e is not None), key=lambda e: (e.created, e.digest))

    async def find(self, reference: ModelReference, incomplete: bool = False) -> list[ModelEntry]:
        """The entries that a reference matches; raises ModelStoreError if there is none."""
        named = [e for e in await self.entries() if e.name == reference.name]
        if not named:
            raise ModelStoreError(f"the mesh has no model {reference.name}")
        found = [e for e in named if e.digest.startswith(reference.digest)]
        if not found:
            raise ModelStoreError(f"the mesh has {_listed(named)}, but not {reference}")
        whole = [e for e in found if e.complete or incomplete]
        if not whole:
            raise ModelStoreError(f"{found[-1].reference} is incomplete: push it again")
        return whole

    async def newest(self, reference: ModelReference) -> ModelEntry:
        """The complete entry that was pushed last, or the one with the digest.

        Raises ModelStoreError if there is none, or if the beginning of a digest is that of several.
        """
        found = await self.find(reference)
        if reference.digest and len(found) > 1:
            raise ModelStoreError(f"{reference} may be {_listed(found)}: name more digits")
        return found[-1]

    async def begin(self, entry: ModelEntry) -> tuple[ModelEntry, int]:
        """The present entry of this name and digest, or the new one, and its version."""
        bucket = await self._bus.js.key_value(self._bus.subjects.catalog_bucket)
        key = await mesh_key(self._bus)
        subject = self._bus.subjects.catalog_key(entry.name, entry.digest)
        try:
            return entry, await bucket.create(subject, _encode(entry, key))
        except Conflict:
            stored = await bucket.get(subject)
            known = _decode(stored.value or b"", key)
            if known is not None:
                return known, stored.revision or 0
            version = await bucket.update(subject, _encode(entry, key), last=stored.revision)
            return entry, version

    async def finish(self, entry: ModelEntry, version: int) -> None:
        """Declare an entry complete; raises Conflict if it was changed or removed meanwhile."""
        bucket = await self._bus.js.key_value(self._bus.subjects.catalog_bucket)
        done = replace(entry, complete=True, created=time.time())
        subject = self._bus.subjects.catalog_key(entry.name, entry.digest)
        data = _encode(done, await mesh_key(self._bus))
        try:
            await bucket.update(subject, data, last=version)
        except Conflict:
            stored = await bucket.get(subject)
            known = _decode(stored.value or b"", await mesh_key(self._bus))
            if known is None or not known.complete:  # another process has not completed it either
                raise

    async def remove(self, entry: ModelEntry) -> None:
        """Remove an entry; its chunks stay."""
        bucket = await self._bus.js.key_value(self._bus.subjects.catalog_bucket)
        await bucket.delete(self._bus.subjects.catalog_key(entry.name, entry.digest))


async def find_model(bus: Bus, reference: ModelReference) -> ModelEntry:
    """The entry that a worker or a person means; raises ModelStoreError."""
    try:
        return await ModelCatalog(bus).newest(reference)
    except BusError as error:
        raise ModelStoreError(f"cannot read the catalog of models: {cause(error)}") from error


def _listed(entries: list[ModelEntry]) -> str:
    return ", ".join(entry.reference for entry in entries)


def _encode(entry: ModelEntry, key: bytes) -> bytes:
    body = msgspec.msgpack.encode(entry)
    return hmac.digest(key, PURPOSE + body, "sha256") + body


def _decode(data: bytes, key: bytes) -> ModelEntry | None:
    """An entry; None if it is malformed or was not made with the mesh's key."""
    mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(key, PURPOSE + body, "sha256")):
        return None
    try:
        return msgspec.msgpack.decode(body, type=ModelEntry)
    except msgspec.MsgspecError:
        return None
