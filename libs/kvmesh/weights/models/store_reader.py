"""The model store as a source of a copy of weights."""

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.transfer import TransferError
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.store import ModelStore


class StoreReader:
    """Reads the chunks of a copy whose model is in the store. A cancelled read writes no more."""

    direct = True

    def __init__(self, bus: Bus, manifest: Manifest) -> None:
        self._manifest = manifest
        self._store = ModelStore(bus)

    async def read(self, chunk: int, target: memoryview) -> None:
        size = self._manifest.chunks[chunk].size
        try:
            await self._store.chunk(self._manifest.chunk_digest(chunk), target[:size])
        except BusError as error:
            raise TransferError("lost", "", cause(error)) from error

    async def have(self) -> bytes:
        return b"\1" * len(self._manifest.chunks)

    def close(self) -> None:
        """The connection to NATS belongs to the process."""
