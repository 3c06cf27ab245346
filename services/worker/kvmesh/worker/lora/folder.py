"""Folders of LoRA adapters in PEFT's format, checked and digested before an engine reads them."""

import json
import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from kvmesh.bus.messages import adapter_identity, is_adapter_name
from kvmesh.bus.messages.discovery import DIGITS

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
# in the order in which vLLM looks for them
WEIGHTS = (SAFETENSORS, "adapter_model.bin", "adapter_model.pt")
_NOTES = ("base_model_name_or_path", "revision", "inference_mode")
_CONFIG_BYTES = 16 << 20
_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
_CHUNK_BYTES = 1 << 20


class AdapterError(Exception):
    """The adapter cannot be loaded or unloaded; the message is for the operator."""


class NoRoom(AdapterError):
    """As many adapters are loaded as may be, and none of them may leave now."""


class _Config(msgspec.Struct):
    r: int
    peft_type: str | None = None
    rank_pattern: dict[str, int] | None = None


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class AdapterFolder:
    """A checked adapter; `rank` is its largest one. `stamp` changes if a file is written again.

    `weights` is the name of the file with the weights.
    """

    path: Path
    weights: str
    rank: int
    digest: str
    stamp: tuple[tuple[int, int, int], ...]

    def check_rank(self, max_rank: int) -> None:
        """Raise AdapterError if the rank exceeds `max_rank`, unless that is 0."""
        if max_rank and self.rank > max_rank:
            raise AdapterError(
                f"{self.path} has rank {self.rank}; the engine accepts at most {max_rank}"
            )

    def moved(self, path: Path) -> "AdapterFolder":
        """The same adapter in another folder, whose files are known to be equal; raises OSError."""
        return replace(self, path=path, stamp=_stamp(path / CONFIG, path / self.weights))

    def is_unchanged(self) -> bool:
        """True if no file of the adapter has been written or replaced since it was read."""
        try:
            return _stamp(self.path / CONFIG, _weights(self.path)) == self.stamp
        except (AdapterError, OSError):
            return False


def read_adapter(path: Path, max_rank: int = 0) -> AdapterFolder:
    """Check an adapter and digest its content, in the time that reading all of its weights takes.

    Raises AdapterError if it lacks a file, a file is unreadable or malformed, its content changes
    meanwhile, or its rank exceeds `max_rank` (0: no limit).
    """
    path = path.absolute()
    if not path.is_dir():
        raise AdapterError(f"{path} is not a folder")
    if not (path / CONFIG).is_file():
        raise AdapterError(f"{path} has no {CONFIG}")
    try:
        weights = _weights(path)
        stamp = _stamp(path / CONFIG, weights)
        content, rank = _read_config(path / CONFIG)
        if weights.name == SAFETENSORS:
            _check_safetensors(weights)
        found = AdapterFolder(path, weights.name, rank, _digest(content, weights), stamp)
    except OSError as error:
        raise AdapterError(f"cannot read {error.filename or path}: {error.strerror}") from error
    found.check_rank(max_rank)
    if not found.is_unchanged():
        raise AdapterError(f"{path} was changed while it was read")
    return found


def plain_config(path: Path) -> bytes:
    """The configuration of an adapter without notes, the same bytes for each copy of an adapter.

    Raises AdapterError or OSError.
    """
    content, _ = _read_config(path / CONFIG)
    return json.dumps(content, sort_keys=True).encode()


def configured_folders(pairs: list[str]) -> dict[str, Path]:
    """The folders of a setting with entries NAME=FOLDER, which was checked before, by name."""
    return {name: Path(folder) for name, _, folder in (pair.partition("=") for pair in pairs)}


def configured_adapters(pairs: list[str]) -> dict[str, AdapterFolder]:
    """Adapters of a setting with entries NAME=FOLDER, by identity; raises AdapterError."""
    found: dict[str, AdapterFolder] = {}
    names = set()
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not is_adapter_name(name) or name in names:
            raise AdapterError(f"LoRA adapter {pair!r} is not NAME=FOLDER with a new, plain name")
        names.add(name)
        adapter = read_adapter(Path(folder))
        found[adapter_identity(name, adapter.digest)] = adapter
    return found


def _weights(path: Path) -> Path:
    for name in WEIGHTS:
        if (path / name).is_file():
            return path / name
    raise AdapterError(f"{path} has no {SAFETENSORS}")


def _stamp(*files: Path) -> tuple[tuple[int, int, int], ...]:
    states = [file.stat() for file in files]
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)


def _read_config(file: Path) -> tuple[dict[str, Any], int]:
    """The content of the configuration without notes, and the largest rank."""
    if file.stat().st_size > _CONFIG_BYTES:
        raise AdapterError(f"{file} has more than {_CONFIG_BYTES} bytes")
    try:
        content = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(content, _Config)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AdapterError(f"{file}: {error}") from error
    if config.peft_type not in (None, "LORA"):
        raise AdapterError(f"{file}: peft_type is {config.peft_type}, not LORA")
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if min(ranks) < 1:
        raise AdapterError(f"{file}: rank {min(ranks)} is less than 1")
    return {key: value for key, value in content.items() if key not in _NOTES}, max(ranks)


def _check_safetensors(file: Path) -> None:
    """Raise AdapterError unless the header is valid and all tensors are within the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(_HEADER_BYTES, size - 8):
            raise AdapterError(f"{file} is not a safetensors file")
        header = stream.read(length)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, Any])
        tensors.pop("__metadata__", None)
        ends = [msgspec.convert(t, _Tensor).data_offsets[1] for t in tensors.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AdapterError(f"{file} has a malformed header: {error}") from error
    if not ends:
        raise AdapterError(f"{file} has no tensors")
    if 8 + length + max(ends) != size:
        raise AdapterError(f"{file} has {size} bytes; its header states {8 + length + max(ends)}")


def _digest(config: dict[str, Any], weights: Path) -> str:
    digest = sha256(json.dumps(config, sort_keys=True).encode())
    digest.update(f"\n{weights.name} {os.stat(weights).st_size}\n".encode())
    with weights.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:DIGITS]
