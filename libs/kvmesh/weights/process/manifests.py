"""Manifests in the mesh's object store, under a key that all workers of the mesh share."""

from contextlib import suppress
from functools import partial

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import Conflict, NotFound, ObjectUnreadable
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.shared_secret import keep_secret, shared_secret
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.subjects import manifest_object
from kvmesh.weights.errors import ManifestError
from kvmesh.weights.manifest import MAX_PACKED, Manifest, unpack

KEY_BYTES = 32
PATIENCE_S = 5.0
ATTEMPTS = 3


class ManifestStore:
    """Reads and writes manifests by digest."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._key = b""
        self._under_former_key: set[str] = set()
        self._kept: set[str] = set()

    async def get(self, digest: str) -> Manifest:
        """The manifest with this digest; raises BusError, or ManifestError if there is none."""
        name = manifest_object(digest)
        try:
            bucket = ObjectBucket(self._bus, self._bus.subjects.model_bucket)
            packed = await bucket.content(name, MAX_PACKED)
            key = await self._secret()
        except NotFound as error:
            raise ManifestError(f"there is no manifest {digest}") from error
        except ObjectUnreadable as error:
            raise ManifestError(f"the manifest {digest} is unreadable: {error}") from error
        manifest = unpack(packed, key)
        if manifest.digest != digest:
            raise ManifestError(f"the manifest {digest} has the digest {manifest.digest}")
        return manifest

    async def put(self, manifest: Manifest) -> None:
        """Store a manifest, or give the stored one a new version; raises BusError.

        By its version, a manifest that is in use is not taken for one of former weights.
        """
        name, packed = manifest_object(manifest.digest), manifest.pack(await self._secret())
        bucket = ObjectBucket(self._bus, self._bus.subjects.model_bucket)
        for _ in range(ATTEMPTS):
            try:
                await bucket.touch(await bucket.find(name))
            except NotFound:
                with suppress(Conflict):  # another process was first
                    await bucket.put(name, len(packed), lambda at, n: packed[at : at + n])
                    return
            except Conflict:
                continue
            else:
                return

    def keep(self, manifest: Manifest) -> None:
        """Store a manifest again whenever it is missing, until `release`."""
        self._kept.add(manifest.digest)
        keeper_of(self._bus).restore(_what(manifest.digest), partial(self._restore, manifest))

    def release(self, digest: str) -> None:
        """End what `keep` began."""
        self._kept.discard(digest)
        keeper_of(self._bus).forget(_what(digest))

    async def _restore(self, manifest: Manifest) -> None:
        name, former = manifest_object(manifest.digest), None
        bucket = ObjectBucket(self._bus, self._bus.subjects.model_bucket)
        with suppress(NotFound):
            former = await bucket.find(name)
        if former is not None and manifest.digest not in self._under_former_key:
            return
        packed = manifest.pack(await self._secret())
        with suppress(Conflict):
            await bucket.put(name, len(packed), lambda at, n: packed[at : at + n], former)
        self._under_former_key.discard(manifest.digest)

    async def _secret(self) -> bytes:
        if not self._key:
            self._key = await mesh_key(self._bus)
            bucket, name = self._bus.subjects.weights_bucket, self._bus.subjects.manifests_key
            keep_secret(self._bus, bucket, name, self._key, self._adopt)
        return self._key

    def _adopt(self, key: bytes) -> None:
        self._key, self._under_former_key = key, set(self._kept)


def _what(digest: str) -> str:
    return f"the manifest {digest[:12]}"


async def mesh_key(bus: Bus) -> bytes:
    """The key that authenticates manifests and what names them; raises BusError."""
    bucket, name = bus.subjects.weights_bucket, bus.subjects.manifests_key
    return await shared_secret(bus, bucket, name, KEY_BYTES, patience_s=PATIENCE_S)
