"""The model store: manifests and chunks by digest, and the readers of its chunks.

Order makes locks unnecessary. A push first names what it is going to use, by an entry and its
manifest, and then gives each chunk that it uses a new version. An eviction first notes the versions
of all chunks, then reads the entries, and removes only chunks that have kept their version. So a
push is either seen or has changed the version, also if the eviction stood still for an hour.
"""

import asyncio
from collections.abc import Iterable

from blake3 import blake3

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.weights.errors import ManifestError, WrongDigest
from kvmesh.weights.manifest import MAX_PACKED, Manifest, unpack
from kvmesh.weights.process.manifests import mesh_key


def manifest_name(digest: str) -> str:
    """The name of the object that holds the manifest of a folder."""
    return f"manifest-{digest}"


def chunk_names(manifest: Manifest) -> list[str]:
    """The names of the objects that hold a manifest's chunks, in order."""
    return [manifest.chunk_digest(n).hex() for n in range(len(manifest.chunks))]


def used_by(manifests: Iterable[Manifest]) -> set[str]:
    """The names of all objects that folders use."""
    used: set[str] = set()
    for manifest in manifests:
        used.add(manifest_name(manifest.digest))
        used.update(chunk_names(manifest))
    return used


class ModelStore:
    """Reads of the model store; `objects` is its bucket."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.objects = ObjectBucket(bus, bus.subjects.model_store_bucket)

    async def manifest(self, digest: str) -> Manifest:
        """The manifest of a folder; raises ManifestError, also if there is none."""
        name = manifest_name(digest)
        try:
            found = await self.objects.find(name)
            if found.size > MAX_PACKED:
                raise ManifestError(f"the manifest {digest} has {found.size} bytes")
            packed = bytearray(found.size)
            await self.objects.read(found, memoryview(packed))
            manifest = unpack(bytes(packed), await mesh_key(self._bus))
        except NotFound as error:
            raise ManifestError(f"there is no manifest {digest}") from error
        except BusError as error:
            raise ManifestError(f"cannot read the manifest {digest}: {cause(error)}") from error
        if manifest.digest != digest or manifest.form != "folder":
            raise ManifestError(f"the manifest {digest} is that of another copy")
        return manifest

    async def chunk(self, digest: bytes, target: memoryview) -> None:
        """Fill `target` with a chunk and verify it; raises BusError or WrongDigest."""
        found = await self.objects.find(digest.hex())
        await self.objects.read(found, target)
        if (await asyncio.to_thread(lambda: blake3(target).digest())) != digest:
            raise WrongDigest("the bytes do not have the digest of their chunk")
