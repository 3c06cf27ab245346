"""Manifest of a model folder's safetensors files, with digests of their chunks."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from kvmesh.weights.errors import CheckpointError, ManifestError
from kvmesh.weights.manifest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    MAX_TENSORS,
    MAX_TEXT,
    FileEntry,
    Form,
    Manifest,
    TensorEntry,
    check,
)

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PATTERN = "*.safetensors"
CONSOLIDATED = "consolidated"  # a second copy of the same weights, in another layout
MAX_HEADER = 100 << 20
MAX_INDEX = 100 << 20
MAX_CACHED = 4096  # files of digests
THREADS = 2


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, with their index if there is one; else empty.

    Raises CheckpointError if the index is malformed or names a missing file.
    """
    index = folder / INDEX
    if index.is_file():
        names = _indexed(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and len(missing) < len(names):
            raise CheckpointError(f"{folder} has no {missing[0]}, which {INDEX} names")
        return [] if missing else [index, *(folder / name for name in names)]
    files = sorted(folder.glob(PATTERN))
    return [f for f in files if f.is_file() and not f.name.startswith(CONSOLIDATED)]


def checkpoint_manifest(
    folder: Path,
    *,
    model: str = "",
    revision: str = "",
    form: Form = "checkpoint",
    engine: str = "",
    engine_version: str = "",
    rank: int = 0,
    ranks: int = 1,
    processed: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    cache: Path | None = None,
    threads: int = THREADS,
) -> Manifest:
    """Read and digest the weight files of a folder; blocks for as long as reading them takes.

    Digests of unchanged files are taken from the folder `cache`. Raises CheckpointError.
    """
    paths = weight_files(folder)
    if not paths:
        raise CheckpointError(f"{folder} has no safetensors files")
    try:
        files = [FileEntry(path.name, path.stat().st_size) for path in paths]
        tensors = [
            tensor
            for index, path in enumerate(paths)
            if path.name != INDEX
            for tensor in _tensors(path, index)
        ]
        with ThreadPoolExecutor(threads, "digests") as pool:
            digests = [file_digests(path, chunk_bytes, cache, pool) for path in paths]
    except OSError as error:
        raise CheckpointError(f"cannot read the weights in {folder}: {error}") from error
    manifest = Manifest(
        model=model,
        revision=revision,
        quantization=_quantization(folder),
        form=form,
        rank=rank,
        ranks=ranks,
        engine=engine,
        engine_version=engine_version,
        processed=processed,
        chunk_bytes=chunk_bytes,
        files=files,
        tensors=tensors,
        digests=b"".join(digests),
    )
    try:
        check(manifest)
    except ManifestError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return manifest


def known_manifest(folder: Path, cache: Path, model: str, revision: str) -> Manifest | None:
    """The manifest of a folder whose digests are all in `cache`, without reading its tensors."""
    with suppress(CheckpointError, OSError):
        paths = weight_files(folder)
        if paths and all(_cached(*_cache_entry(path, CHUNK_BYTES, cache)) for path in paths):
            return checkpoint_manifest(folder, model=model, revision=revision, cache=cache)
    return None


def _quantization(folder: Path) -> str:
    """The method by which the weights are quantised, as in the model's configuration; or empty."""
    try:
        with (folder / CONFIG).open("rb") as file:
            found = json.loads(file.read(MAX_INDEX))["quantization_config"]["quant_method"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return found if isinstance(found, str) and len(found) <= MAX_TEXT else ""


def cache_folder() -> Path:
    """The folder in which this user's processes keep digests."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvmesh" / "weights"


def _indexed(index: Path) -> list[str]:
    try:
        if index.stat().st_size > MAX_INDEX:
            raise CheckpointError(f"{index} is too large")
        places = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: {error!r}") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{index} names files outside of its folder")
    return names


def _tensors(path: Path, file: int) -> Iterator[TensorEntry]:
    """The tensors in the header of a safetensors file, in the order of their bytes."""
    with path.open("rb") as source:
        header, start = _header(path, source)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path} has {len(header)} tensors")
    try:
        entries = [
            TensorEntry(name, str(t["dtype"]), [int(n) for n in t["shape"]], file, start + at, size)
            for name, t in header.items()
            for at, size in [_place(t)]
        ]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} has a malformed header: {error!r}") from error
    return iter(sorted(entries, key=lambda entry: entry.offset))


def _place(tensor: dict[str, Any]) -> tuple[int, int]:
    begin, end = (int(n) for n in tensor["data_offsets"])
    return begin, end - begin


def _header(path: Path, source: BinaryIO) -> tuple[dict[str, Any], int]:
    """The decoded header of a safetensors file, and the offset at which the tensors begin."""
    size = int.from_bytes(source.read(8), "little")
    if not 0 < size <= min(MAX_HEADER, path.stat().st_size - 8):
        raise CheckpointError(f"{path} is not a safetensors file: a header of {size} bytes")
    try:
        header = json.loads(source.read(size))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a malformed header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a malformed header")
    return header, 8 + size


def file_digests(
    path: Path, chunk_bytes: int, cache: Path | None, pool: ThreadPoolExecutor
) -> bytes:
    """The digests of the chunks of a file, computed by `pool` unless `cache` has them.

    Raises OSError, or CheckpointError if the file changes meanwhile.
    """
    before = _identity(path)
    count = -(-path.stat().st_size // chunk_bytes)
    known = None
    if cache is not None:
        known, count = _cache_entry(path, chunk_bytes, cache)
        if found := _cached(known, count):
            return found
    with path.open("rb") as source:
        number = source.fileno()

        def digest(chunk: int) -> bytes:
            return blake3(os.pread(number, chunk_bytes, chunk * chunk_bytes)).digest()

        digests = b"".join(pool.map(digest, range(count)))
    if _identity(path) != before:
        raise CheckpointError(f"{path} changes while it is read")
    if known:
        with suppress(OSError):  # a full disk: it is computed again next time
            _keep(known, digests)
    return digests


def keep_digests(path: Path, chunk_bytes: int, cache: Path, digests: bytes) -> None:
    """Keep the digests of a file whose bytes are verified in the folder `cache`, if possible."""
    with suppress(OSError):
        _keep(_cache_entry(path, chunk_bytes, cache)[0], digests)


def _cache_entry(path: Path, chunk_bytes: int, cache: Path) -> tuple[Path, int]:
    """The file of the cache for a file's digests, and their number."""
    name = hashlib.sha256(f"{_identity(path)} {chunk_bytes}".encode()).hexdigest()
    return cache / name, -(-path.stat().st_size // chunk_bytes)


def _identity(path: Path) -> str:
    found = path.stat()
    return f"{path.resolve()} {found.st_size} {found.st_mtime_ns} {found.st_ino}"


def _cached(file: Path, count: int) -> bytes:
    """Digests that were kept; empty if there are none or the file is damaged."""
    with suppress(OSError):
        data = file.read_bytes()
        digests, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if len(digests) == count * DIGEST_BYTES and blake3(digests).digest() == checksum:
            os.utime(file)
            return digests
    return b""


def _keep(file: Path, digests: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    new.write_bytes(digests + blake3(digests).digest())
    new.rename(file)
    kept = sorted(file.parent.iterdir(), key=lambda each: each.stat().st_mtime)
    for old in kept[:-MAX_CACHED]:
        old.unlink(missing_ok=True)
