"""An engine's loaded parameters and buffers, kept in the memory of its node for its next start.

They are written before the engine processes them, so that the next start goes on from there. The
fingerprint of everything that determines them names their copy.
"""

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvmesh.weights.checkpoint import checkpoint_manifest, weight_files
from kvmesh.weights.errors import WeightsError
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.adapters.weights.mapped_tensors import NAMES, stored_tensors

log = logging.getLogger(__name__)
FILE = "engine.safetensors"
NOTE = "kvmesh"
ALIGNMENT = 64  # bytes, of tensors whose size is a multiple of it
DIGEST_THREADS = 4


@dataclass(frozen=True)
class FormKey:
    """Name of the form of one rank: equal fingerprints have equal parameters."""

    engine: str
    fingerprint: str
    rank: int = 0
    ranks: int = 1


def form_key(
    engine: str, model: nn.Module, facts: dict[str, Any], rank: int = 0, ranks: int = 1
) -> FormKey:
    """The key of a model that was created but not loaded, and of the facts that change its weights.

    `facts` is JSON. The names, types and shapes of all that the model consists of count too.
    """
    content = json.dumps([facts, structure(model), rank, ranks], sort_keys=True, default=str)
    return FormKey(engine, sha256(content.encode()).hexdigest(), rank, ranks)


def structure(model: nn.Module) -> list[Any]:
    """The modules of a model, and its parameters and buffers with the names that each has."""
    modules = [
        [name, _kind(module), _kind(getattr(module, "quant_method", None))]
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    numbers: dict[int, int] = {}
    tensors = [
        [name, _kind(t), list(t.shape), list(t.stride()), str(t.dtype), t.device.type, number]
        for name, t in _named(model)
        for number in [numbers.setdefault(id(t), len(numbers))]
    ]
    return [modules, tensors]


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the first of their names: tied weights have several."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _named(model):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def find_form(store: WeightStore, keys: Sequence[FormKey]) -> StoredCopy | None:
    """A complete form with one of the keys, in use by the caller; raises StoreError."""
    for manifest in store.list():
        found = FormKey(manifest.engine, manifest.engine_version, manifest.rank, manifest.ranks)
        if manifest.form == "engine" and found in keys:
            copy = store.open(manifest.digest)
            if copy is not None and copy.complete:
                return copy
            if copy is not None:
                copy.close()
    return None


def fill(model: nn.Module, copy: StoredCopy) -> bool:
    """Give all parameters and buffers of the model their values; False, and no change, if not all.

    On the CPU they share the memory of the copy, which the caller keeps in use.
    """
    targets, sources = distinct_tensors(model), stored_tensors(copy)
    if targets.keys() != sources.keys() or any(
        target.shape != sources[name].shape or target.dtype != sources[name].dtype
        for name, target in targets.items()
    ):
        return False
    users = Counter(_storage(target) for target in targets.values())
    for name, target in targets.items():
        if _owns_storage(target) and users[_storage(target)] == 1:
            target.data = sources[name]
        else:
            target.data.copy_(sources[name])
    return True


def keep_form(
    store: WeightStore, key: FormKey, model: nn.Module, note: str = ""
) -> StoredCopy | None:
    """Write the form of a loaded model, to be kept; None, and a line in the log, if that fails.

    `note` is for `note_of`.
    """
    tensors = distinct_tensors(model)
    unknown = {str(tensor.dtype) for tensor in tensors.values() if tensor.dtype not in NAMES}
    if unknown or any(tensor.is_meta for tensor in tensors.values()):
        log.warning(
            "the weights are not kept: %s", ", ".join(sorted(unknown)) or "some are missing"
        )
        return None
    header, order = _header(tensors, note)
    folder: Path | None = None
    try:
        folder = store.scratch(len(header) + sum(tensor.nbytes for tensor in order))
        _write(folder / FILE, header, order)
        manifest = checkpoint_manifest(
            folder,
            form="engine",
            engine=key.engine,
            engine_version=key.fingerprint,
            rank=key.rank,
            ranks=key.ranks,
            threads=DIGEST_THREADS,
        )
        copy = store.adopt(manifest, folder)
    except (OSError, WeightsError, RuntimeError) as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        log.warning("the weights are not kept for the next start: %s", error)
        return None
    copy.set_keep()
    return copy


def note_of(form: StoredCopy) -> str:
    """The note with which a form was kept."""
    memory = form.file(0)
    size = int.from_bytes(memory[:8], "little")
    note: str = json.loads(memory[8 : 8 + size])["__metadata__"][NOTE]
    return note


def disk_identity(folder: Path) -> str:
    """Name of the weights in a folder, by their files' places, sizes and times; empty if none.

    Raises CheckpointError.
    """
    files = weight_files(folder)
    states = [(str(file.resolve()), file.stat()) for file in files]
    text = [(path, state.st_size, state.st_mtime_ns, state.st_ino) for path, state in states]
    return sha256(repr(text).encode()).hexdigest() if files else ""


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _owns_storage(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_pinned()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _header(tensors: dict[str, Tensor], note: str) -> tuple[bytes, list[Tensor]]:
    """The header of a safetensors file, and the tensors in the order of their bytes.

    Tensors whose size is a multiple of ALIGNMENT come first, then those of the largest elements:
    all begin at a multiple of the size of their elements, most at one of ALIGNMENT.
    """
    order = sorted(
        tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, -item[1].itemsize)
    )
    entries: dict[str, Any] = {"__metadata__": {NOTE: note}}
    offset = 0
    for name, tensor in order:
        end = offset + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in order]


def _write(path: Path, header: bytes, tensors: Iterable[Tensor]) -> None:
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for tensor in tensors:
            if tensor.nbytes:
                flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                _write_all(file.fileno(), memoryview(flat.numpy().data))


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
