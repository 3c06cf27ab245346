"""Tensors in the memory of stored copies: mapped privately, never copied, free to be changed."""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from kvmesh.weights.errors import WeightsLost
from kvmesh.weights.manifest import Manifest, TensorEntry
from kvmesh.weights.stored_copy import StoredCopy

# types of safetensors; those of less than a byte are left to libraries that unpack them
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def unknown_dtypes(manifest: Manifest) -> list[str]:
    """The types of a copy's tensors that cannot be mapped."""
    return sorted({tensor.dtype for tensor in manifest.tensors} - DTYPES.keys())


class MappedFiles:
    """The files of a copy, each mapped once, privately: what an engine writes stays its own.

    The maps live as long as their tensors.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._maps: dict[int, mmap.mmap] = {}

    def tensor(self, entry: TensorEntry) -> Tensor:
        """A tensor of the copy; raises WeightsLost if its file cannot be mapped."""
        memory = self._maps.get(entry.file)
        if memory is None:
            memory = self._maps[entry.file] = self._map(entry.file)
        return view(memory, entry, entry.offset)

    def _map(self, file: int) -> mmap.mmap:
        path = self._folder / self._manifest.files[file].name
        try:
            with path.open("rb") as content:
                return mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WeightsLost(f"cannot map {path}: {error}") from error


def view(memory: mmap.mmap | bytearray, entry: TensorEntry, offset: int) -> Tensor:
    """The tensor whose bytes are at `offset` of `memory`, which it keeps alive."""
    dtype = DTYPES[entry.dtype]
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    content = torch.frombuffer(memory, dtype=torch.uint8, count=entry.size, offset=offset)
    if offset % dtype.itemsize:
        content = content.clone()
    return content.view(dtype).view(entry.shape)


def stored_tensors(copy: StoredCopy) -> dict[str, Tensor]:
    """All tensors of a complete copy."""
    files = MappedFiles(copy.folder, copy.manifest)
    return {entry.name: files.tensor(entry) for entry in copy.manifest.tensors}
