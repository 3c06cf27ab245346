"""Files of a model on their way into a folder: verified, written through, then shown at once."""

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from kvmesh.weights.checkpoint import cache_folder, file_digests, keep_digests
from kvmesh.weights.errors import CheckpointError, ModelStoreError
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.cache import ModelPlace
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import ABSENT, HELD, remove_tree

COPY = "weights"
THREADS = 2
PUBLIC = 0o644  # of files in a folder of the user's choice


def is_verified(path: Path, manifest: Manifest, index: int) -> bool:
    """True if a file is that of the manifest; reads it unless it is known and unchanged."""
    if not path.is_file() or path.stat().st_size != manifest.files[index].size:
        return False
    with suppress(CheckpointError), ThreadPoolExecutor(THREADS, "digests") as pool:
        found = file_digests(path, manifest.chunk_bytes, cache_folder(), pool)
        return found == manifest.file_digests(index)
    return False


def write_verified(new: Path, path: Path, manifest: Manifest, index: int) -> None:
    """Show a file whose bytes are verified under its name, on the disk; raises OSError."""
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    new.rename(path)
    _sync_folder(path.parent)
    keep_digests(path, manifest.chunk_bytes, cache_folder(), manifest.file_digests(index))


class StagedWeights:
    """The copy of weights that a pull fills below the root of a place."""

    def __init__(self, place: ModelPlace, manifest: Manifest, present: Collection[int]) -> None:
        """Open what an earlier pull has left, verified anew, or begin.

        `present` are the files that the folder has already. Raises StoreError or OSError.
        """
        self._place = place
        self._folder = place.root / COPY
        self.copy = WeightStore(self._folder, manifest.size).create(manifest)
        self.copy.set_keep()
        if not self.copy.fetch():
            raise ModelStoreError(f"another process fills {self._folder}")
        for index, file in enumerate(manifest.files):
            path, chunks = self.copy.folder / file.name, manifest.file_chunks(index)
            if index in present:
                path.unlink(missing_ok=True)
                self._mark(chunks, HELD)
            elif path.exists():
                self._verify(index)
            else:  # it was moved into the folder, and is not there any more
                with path.open("xb") as new:
                    new.truncate(file.size)
                self._mark(chunks, ABSENT)

    def install(self) -> None:
        """Move the files into the folder; raises OSError."""
        manifest = self.copy.manifest
        for index, file in enumerate(manifest.files):
            path = self.copy.folder / file.name
            if path.exists():
                if not self._place.cached:
                    path.chmod(PUBLIC)
                write_verified(path, self._place.folder / file.name, manifest, index)

    def close(self) -> None:
        """Keep the copy for the next pull unless its files are in the folder."""
        done = not any(self.copy.folder.iterdir())
        self.copy.close()
        if done:
            with suppress(OSError):
                remove_tree(self._folder)

    def _mark(self, chunks: range, state: int) -> None:
        self.copy.have[chunks.start : chunks.stop] = bytes([state]) * len(chunks)

    def _verify(self, index: int) -> None:
        """Forget chunks that a machine which went down has not written to its disk."""
        copy = self.copy
        memory = memoryview(copy.file(index))
        for number in copy.manifest.file_chunks(index):
            _, offset, size = copy.manifest.chunks[number]
            if copy.has(number):
                digest = blake3(memory[offset : offset + size]).digest()
                if digest != copy.manifest.chunk_digest(number):
                    copy.have[number] = ABSENT
        memory.release()


def left_over(place: ModelPlace) -> bool:
    """True if a place has weights on their way."""
    return (place.root / COPY).exists()


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
