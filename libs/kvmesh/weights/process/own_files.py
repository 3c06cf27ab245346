"""The weight files of a worker's own model folder: their manifest, and their offer to others."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

from kvmesh.bus.errors import BusError, cause
from kvmesh.weights.checkpoint import (
    INDEX,
    cache_folder,
    checkpoint_manifest,
    known_manifest,
    weight_files,
)
from kvmesh.weights.errors import CheckpointError, WeightsError
from kvmesh.weights.frames import WeightsJob, WeightsKnown
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.offers import Offers

log = logging.getLogger(__name__)
MOST_COMPARED = 8  # files whose beginnings are compared
THREADS = 1  # digests of a worker that serves already take one core at most


class OwnFiles:
    """The files of a job's folder."""

    def __init__(self, job: WeightsJob, offers: Offers, send: Callable[[Struct], None]) -> None:
        self._job = job
        self._offers = offers
        self._send = send
        self._cache = cache_folder()
        self.folder = Path(job.folder)
        self.manifests = offers.manifests

    def present(self) -> bool:
        """True if the folder has weights; logs the reason if they cannot be used."""
        try:
            return bool(weight_files(self.folder))
        except CheckpointError as error:
            log.warning("%s", error)
            return False

    async def differ(self, manifest: Manifest) -> bool:
        """True if sizes or beginnings of the files show that they are other weights."""
        return await asyncio.to_thread(_differ, self.folder, manifest)

    async def known(self) -> Manifest | None:
        """The manifest of the files, if they were digested before and have not changed."""
        job = self._job
        return await asyncio.to_thread(
            known_manifest, self.folder, self._cache, job.model, job.revision
        )

    async def digested(self) -> Manifest:
        """The manifest of the files, which are read for it; raises CheckpointError."""
        job = self._job
        return await asyncio.to_thread(
            checkpoint_manifest,
            self.folder,
            model=job.model,
            revision=job.revision,
            cache=self._cache,
            threads=THREADS,
        )

    async def publish(self, manifest: Manifest) -> bool:
        """Store the manifest in the mesh, offer the files, and tell the parent; False if not."""
        try:
            await self.manifests.put(manifest)
            await self._offers.add_files(manifest, self.folder)
        except (BusError, WeightsError, OSError) as error:
            log.warning("cannot offer the weights in %s: %s", self.folder, cause(error))
            return False
        self._send(WeightsKnown(manifest.digest))
        return True


def _differ(folder: Path, manifest: Manifest) -> bool:
    tensors = [n for n, file in enumerate(manifest.files) if file.name != INDEX]
    if {path.name for path in weight_files(folder)} != {file.name for file in manifest.files}:
        return True
    if any(
        (folder / manifest.files[n].name).stat().st_size != manifest.files[n].size for n in tensors
    ):
        return True
    for number in tensors[:: max(len(tensors) // MOST_COMPARED, 1)]:
        first = manifest.file_chunks(number).start
        with (folder / manifest.files[number].name).open("rb") as file:
            begin = file.read(manifest.chunks[first].size)
        if blake3(begin).digest() != manifest.chunk_digest(first):
            return True
    return False
