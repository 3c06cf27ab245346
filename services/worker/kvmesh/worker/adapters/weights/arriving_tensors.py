"""The tensors of a copy that is still on its way, each as soon as its bytes are there."""

import logging
import mmap
import time
from pathlib import Path
from threading import Lock

from blake3 import blake3
from torch import Tensor

from kvmesh.weights.errors import WeightsLost
from kvmesh.weights.manifest import Manifest, TensorEntry, WeightChunk
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.adapters.weights.mapped_tensors import MappedFiles, view

log = logging.getLogger(__name__)
STALL_S = 30.0  # without a new chunk
PROGRESS_S = 10.0
PAGE = mmap.PAGESIZE


class CopyProgress:
    """Tells the log how much of a copy has arrived, if it takes long."""

    def __init__(self, copy: StoredCopy) -> None:
        self._copy = copy
        self._told_at = time.monotonic()

    def tell(self) -> None:
        """Log the share that is here, at most once in PROGRESS_S seconds."""
        if time.monotonic() - self._told_at > PROGRESS_S:
            self._told_at = time.monotonic()
            share = self._copy.present / len(self._copy.manifest.chunks)
            log.info("%d %% of the weights are here", 100 * share)


class ArrivingTensors:
    """Tensors of a copy that may still be on its way; several threads may read them.

    If the copy fails, the tensors that are still to be read come from the model's `folder`, if it
    holds the same bytes.
    """

    def __init__(self, copy: StoredCopy, folder: Path, stall_s: float = STALL_S) -> None:
        self._copy = copy
        self._folder = folder
        self._stall_s = stall_s
        self._files = MappedFiles(copy.folder, copy.manifest)
        self._progress = CopyProgress(copy)
        self._disk: VerifiedFolder | None = None
        self._lock = Lock()

    @property
    def entries(self) -> list[TensorEntry]:
        """All tensors in the order of the files and of their bytes, in which they arrive."""
        return sorted(self._copy.manifest.tensors, key=lambda entry: (entry.file, entry.offset))

    def read(self, entry: TensorEntry) -> Tensor:
        """A tensor; blocks until it is there. Raises WeightsLost if it comes from nowhere."""
        if self._disk is None:
            try:
                self._copy.wait(_chunks(self._copy.manifest, entry), self._stall_s)
            except WeightsLost as error:
                self._read_folder(entry, error)
        with self._lock:
            if self._disk is None:
                self._progress.tell()
            return (self._disk or self._files).tensor(entry)

    def _read_folder(self, entry: TensorEntry, error: WeightsLost) -> None:
        with self._lock:
            if self._disk is not None:
                return
            log.warning(
                "the copy of the weights stopped at %s (%s): the others come from %s",
                entry.name,
                error,
                self._folder,
            )
            self._disk = VerifiedFolder(self._copy.manifest, self._folder)


def _chunks(manifest: Manifest, entry: TensorEntry) -> range:
    """The chunks of all pages that hold a part of the tensor.

    A loader may change a tensor in its private map, and from then on a page of it receives nothing.
    """
    if not entry.size:
        return range(0)
    first = entry.offset // PAGE * PAGE
    end = min(-(-(entry.offset + entry.size) // PAGE) * PAGE, manifest.files[entry.file].size)
    return manifest.chunks_in(entry.file, first, end - first)


class VerifiedFolder:
    """Tensors from a model folder whose bytes are those of a manifest."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest = manifest
        self._folder = folder
        self._last: tuple[int, bytes] = (-1, b"")  # small tensors share a chunk

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Read and verify a tensor; raises WeightsLost."""
        content = bytearray(entry.size)
        for number in self._manifest.chunks_of(entry):
            chunk = self._manifest.chunks[number]
            data = self._chunk(number, chunk)
            begin, end = chunk.offset, chunk.offset + chunk.size
            first, last = max(begin, entry.offset), min(end, entry.offset + entry.size)
            content[first - entry.offset : last - entry.offset] = data[first - begin : last - begin]
        return view(content, entry, 0)

    def _chunk(self, number: int, chunk: WeightChunk) -> bytes:
        if self._last[0] != number:
            path = self._folder / self._manifest.files[chunk.file].name
            try:
                with path.open("rb") as content:
                    content.seek(chunk.offset)
                    data = content.read(chunk.size)
            except OSError as error:
                raise WeightsLost(f"cannot read {path}: {error.strerror}") from error
            if blake3(data).digest() != self._manifest.chunk_digest(number):
                raise WeightsLost(f"{path} holds other weights than the copy")
            self._last = (number, data)
        return self._last[1]
