"""Manifests in the mesh's object store, under a key that all workers of the mesh share."""

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.storage.shared_secret import shared_secret
from kvmesh.bus.subjects import manifest_object
from kvmesh.weights.errors import ManifestError
from kvmesh.weights.manifest import MAX_PACKED, Manifest, unpack

KEY_BYTES = 32
PATIENCE_S = 5.0


class ManifestStore:
    """Reads and writes manifests by digest."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._key = b""

    async def get(self, digest: str) -> Manifest:
        """The manifest with this digest; raises BusError, or ManifestError if there is none."""
        name = manifest_object(digest)
        try:
            store = await self._bus.js.object_store(self._bus.subjects.model_bucket)
            info = await store.get_info(name)
            if (info.size or 0) > MAX_PACKED:
                raise ManifestError(f"the manifest {digest} has {info.size} bytes")
            packed = (await store.get(name)).data or b""
            key = await self._secret()
        except NotFound as error:
            raise ManifestError(f"there is no manifest {digest}") from error
        manifest = unpack(packed, key)
        if manifest.digest != digest:
            raise ManifestError(f"the manifest {digest} has the digest {manifest.digest}")
        return manifest

    async def put(self, manifest: Manifest) -> None:
        """Store a manifest unless it is there already; raises BusError."""
        name = manifest_object(manifest.digest)
        store = await self._bus.js.object_store(self._bus.subjects.model_bucket)
        try:
            await store.get_info(name)
        except NotFound:
            await store.put(name, manifest.pack(await self._secret()))

    async def _secret(self) -> bytes:
        if not self._key:
            subjects = self._bus.subjects
            bucket, name = subjects.weights_bucket, subjects.manifests_key
            self._key = await shared_secret(
                self._bus, bucket, name, KEY_BYTES, patience_s=PATIENCE_S
            )
        return self._key
