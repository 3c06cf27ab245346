"""Manifest of a copy of weights: its files, its tensors, and a digest of each chunk."""

import hmac
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.storage.named_templates import template_name
from kvmesh.weights.errors import ManifestError

CHUNK_BYTES = 8 << 20
DIGEST_BYTES = 32
MAX_PACKED = 256 << 20
MAX_FILES = 10_000
MAX_TENSORS = 1_000_000
MAX_CHUNKS = 1 << 20
MAX_BYTES = 1 << 50
MAX_DIMENSIONS = 32
MAX_TEXT = 1024  # characters of a name
MIN_CHUNK, MAX_CHUNK = 1 << 10, 1 << 30
_MAC_BYTES = 32
_PURPOSE = b"kvmesh weights manifest\0"
Form: TypeAlias = Literal["checkpoint", "engine", "compiled", "adapter", "folder"]
# bits of one element of each safetensors type
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def chunk_digests(file: Path, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The digests of a file's chunks, as a manifest has them; raises OSError."""
    digests = []
    with file.open("rb") as content:
        while chunk := content.read(chunk_bytes):
            digests.append(blake3(chunk).digest())
    return b"".join(digests)


class FileEntry(Struct, frozen=True, array_like=True):
    """A file of a copy: its name in the copy's folder, and its bytes."""

    name: str
    size: int


class TensorEntry(Struct, frozen=True, array_like=True):
    """A tensor: `size` bytes at `offset` of the file with index `file`.

    `dtype` is the name of its type in safetensors; `shape` counts elements.
    """

    name: str
    dtype: str
    shape: list[int]
    file: int
    offset: int
    size: int


class WeightChunk(NamedTuple):
    """`size` bytes at `offset` of the file with index `file`; chunks never span files."""

    file: int
    offset: int
    size: int


class Manifest(Struct, frozen=True, dict=True, kw_only=True):
    """Content of one copy of weights.

    `form` is "checkpoint" for the files of a model folder, "engine" for the parameters of one rank
    of an engine, after (`processed`, which none is so far) or before it has processed them, where
    `engine_version` is a hash of all that shapes them, such as versions and layouts; "compiled" for
    an archive of the code that an engine has compiled, "adapter" for the files of a LoRA adapter,
    and "folder" for all files of a model folder, these three without tensors.
    `digests` holds the BLAKE3 digest, 32 bytes, of each chunk of `chunk_bytes`, file by file.
    `model`, `revision` and `quantization`, the method that the model's configuration names, are
    labels: equal files have the same `digest` under any name.
    """

    model: str = ""
    revision: str = ""
    quantization: str = ""
    form: Form = "checkpoint"
    rank: int = 0
    ranks: int = 1
    engine: str = ""
    engine_version: str = ""
    processed: bool = False
    chunk_bytes: int = CHUNK_BYTES
    files: list[FileEntry]
    tensors: list[TensorEntry]
    digests: bytes

    @cached_property
    def digest(self) -> str:
        """Content address: SHA-256 of everything but the labels, in hexadecimal."""
        return sha256(_encode(replace(self, model="", revision="", quantization=""))).hexdigest()

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def chunks(self) -> list[WeightChunk]:
        """All chunks, in the order of their digests."""
        step = self.chunk_bytes
        return [
            WeightChunk(index, offset, min(step, file.size - offset))
            for index, file in enumerate(self.files)
            for offset in range(0, file.size, step)
        ]

    def chunks_of(self, tensor: TensorEntry) -> range:
        """The chunks that hold a tensor's bytes; empty if it has none."""
        return self.chunks_in(tensor.file, tensor.offset, tensor.size)

    def chunks_in(self, file: int, offset: int, size: int) -> range:
        """The chunks that hold a range of a file."""
        first = self._first_chunks[file]
        if not size:
            return range(first, first)
        step = self.chunk_bytes
        return range(first + offset // step, first + (offset + size - 1) // step + 1)

    def file_chunks(self, file: int) -> range:
        """The chunks of one file."""
        return self.chunks_in(file, 0, self.files[file].size)

    def file_digests(self, file: int) -> bytes:
        """The digests of the chunks of one file, one after another."""
        chunks = self.file_chunks(file)
        return self.digests[chunks.start * DIGEST_BYTES : chunks.stop * DIGEST_BYTES]

    def chunk_digest(self, chunk: int) -> bytes:
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    @cached_property
    def _first_chunks(self) -> list[int]:
        """The first chunk of each file. A file has at least one byte, so they increase."""
        counts = [-(-file.size // self.chunk_bytes) for file in self.files]
        return list(accumulate(counts, initial=0))[:-1]

    def encoded(self) -> bytes:
        """The manifest as bytes, which `decoded` reads."""
        return _encode(self)

    def pack(self, key: bytes) -> bytes:
        """The encoded manifest, authenticated by the mesh's key."""
        body = _encode(self)
        return _mac(key, body) + body


def unpack(data: bytes, key: bytes) -> Manifest:
    """Verify and decode what `pack` returned; raises ManifestError."""
    if len(data) > MAX_PACKED:
        raise ManifestError(f"a manifest of {len(data)} bytes")
    mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise ManifestError("a manifest was not made with this mesh's key")
    return decoded(body)


def decoded(body: bytes) -> Manifest:
    """Decode and check an encoded manifest; raises ManifestError."""
    if len(body) > MAX_PACKED:
        raise ManifestError(f"a manifest of {len(body)} bytes")
    try:
        manifest = msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ManifestError(f"a malformed manifest: {error}") from error
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Raise ManifestError unless every number and name of a manifest is in bounds."""
    labels = (manifest.model, manifest.revision, manifest.quantization)
    if any(len(text) > MAX_TEXT for text in (*labels, manifest.engine, manifest.engine_version)):
        raise ManifestError("a label of a manifest is too long")
    if not 0 <= manifest.rank < manifest.ranks <= 1 << 20:
        raise ManifestError(f"rank {manifest.rank} of {manifest.ranks}")
    if not MIN_CHUNK <= manifest.chunk_bytes <= MAX_CHUNK:
        raise ManifestError(f"chunks of {manifest.chunk_bytes} bytes")
    _check_files(manifest)
    _check_tensors(manifest)


def _check_files(manifest: Manifest) -> None:
    files = manifest.files
    if not 0 < len(files) <= MAX_FILES:
        raise ManifestError(f"{len(files)} files")
    for file in files:
        if not is_file_name(file.name):
            raise ManifestError(f"a file named {file.name[:MAX_TEXT]!r}")
        if file.size <= 0 or file.size > MAX_BYTES:
            raise ManifestError(f"{file.name} has {file.size} bytes")
    if len({file.name for file in files}) != len(files):
        raise ManifestError("two files have the same name")
    if manifest.size > MAX_BYTES:
        raise ManifestError(f"files of {manifest.size} bytes")
    count = sum(-(-file.size // manifest.chunk_bytes) for file in files)
    if count > MAX_CHUNKS or len(manifest.digests) != count * DIGEST_BYTES:
        raise ManifestError(f"{len(manifest.digests)} bytes of digests of {count} chunks")


def _check_tensors(manifest: Manifest) -> None:
    tensors = manifest.tensors
    if len(tensors) > MAX_TENSORS:
        raise ManifestError(f"{len(tensors)} tensors")
    for tensor in tensors:
        if len(tensor.name) > MAX_TEXT or len(tensor.dtype) > MAX_TEXT:
            raise ManifestError("a name of a tensor is too long")
        if not 0 <= tensor.file < len(manifest.files):
            raise ManifestError(f"{tensor.name} is in file {tensor.file}")
        if not _fits(tensor, manifest.files[tensor.file].size):
            raise ManifestError(f"{tensor.name} is not within its file")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ManifestError("two tensors have the same name")
    by_place = sorted(tensors, key=lambda t: (t.file, t.offset, t.size))
    for one, other in pairwise(by_place):
        if one.file == other.file and one.offset + one.size > other.offset:
            raise ManifestError(f"{one.name} and {other.name} overlap")


def _fits(tensor: TensorEntry, file_size: int) -> bool:
    """True if a tensor lies in its file and its size follows from its shape."""
    if len(tensor.shape) > MAX_DIMENSIONS or any(n < 0 for n in tensor.shape):
        return False
    if tensor.offset < 0 or tensor.size < 0 or tensor.offset + tensor.size > file_size:
        return False
    elements = 1
    for length in tensor.shape:
        elements *= length
    bits = DTYPE_BITS.get(tensor.dtype)
    return bits is None or elements * bits == tensor.size * 8


def is_file_name(name: str) -> bool:
    """True for a name without a path that is not hidden, or for that of an additional template."""
    _, slash, last = name.rpartition("/")
    if slash:
        return bool(template_name(name)) and is_file_name(last)
    plain = name.isprintable() and not name.startswith(".") and not set(name) & set("/\\\0")
    return plain and 0 < len(name.encode(errors="replace")) <= 255


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + body, "sha256")


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
