"""The manifest of a whole model folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvmesh.bus.storage.named_templates import additional_templates
from kvmesh.weights.checkpoint import (
    PATTERN,
    checkpoint_manifest,
    file_digests,
    weight_files,
)
from kvmesh.weights.errors import CheckpointError, ManifestError
from kvmesh.weights.manifest import CHUNK_BYTES, FileEntry, Manifest, check, is_file_name

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
CODE = (".py", ".so", ".pyc")
THREADS = 2


class FolderContent(NamedTuple):
    """The manifest of a folder, that of its weights if it has some, and the reasons of files left.

    The files of `weights` are among those of `folder`, with the same digests of chunks.
    """

    folder: Manifest
    weights: Manifest | None
    skipped: dict[str, str]


def folder_content(
    folder: Path,
    model: str,
    *,
    with_code: bool = False,
    cache: Path | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> FolderContent:
    """Read and digest all files of a folder; blocks. Raises CheckpointError.

    Digests of unchanged weight files are taken from the folder `cache`. Code is left out unless
    `with_code`.
    """
    weights = weight_files(folder)
    skipped: dict[str, str] = {}
    paths: list[Path] = []
    try:
        templates = [folder / name for name in additional_templates(folder)]
        for path in sorted([*folder.iterdir(), *templates]):
            if templates and path == templates[0].parent:
                continue
            reason = _reason(path, weights, with_code)
            if reason:
                skipped[path.relative_to(folder).as_posix()] = reason
            else:
                paths.append(path)
        files = [
            FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths
        ]
        with ThreadPoolExecutor(THREADS, "digests") as pool:
            digests = [
                file_digests(path, chunk_bytes, cache if path in weights else None, pool)
                for path in paths
            ]
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error}") from error
    manifest = Manifest(
        model=model,
        form="folder",
        chunk_bytes=chunk_bytes,
        files=files,
        tensors=[],
        digests=b"".join(digests),
    )
    try:
        check(manifest)
    except ManifestError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    checkpoint = None
    if weights:
        checkpoint = checkpoint_manifest(folder, model=model, chunk_bytes=chunk_bytes, cache=cache)
        if weights_of(manifest, checkpoint) is None:
            raise CheckpointError(f"{folder} changes while it is read")
    return FolderContent(manifest, checkpoint, skipped)


def weights_of(folder: Manifest, weights: Manifest) -> list[int] | None:
    """The indices of the files of `weights` in `folder`; None unless they are equal there."""
    places = {file: index for index, file in enumerate(folder.files)}
    found = [places.get(file) for file in weights.files]
    if folder.chunk_bytes != weights.chunk_bytes:
        return None
    indices = [index for index in found if index is not None]
    if len(indices) != len(found):
        return None
    for mine, other in zip(indices, range(len(weights.files)), strict=True):
        if folder.file_digests(mine) != weights.file_digests(other):
            return None
    return indices


def _reason(path: Path, weights: list[Path], with_code: bool) -> str:
    """The reason why a file is left out; empty if it is taken."""
    name = path.name
    if name.startswith("."):
        return "hidden"
    if not path.is_file():
        return "not a file"
    if not is_file_name(name):
        return "its name"
    if path in weights:
        return ""
    if path.match(PATTERN):
        return "not among the weights of the folder"
    if name.endswith(OTHER_WEIGHTS):
        return "weights that are not safetensors"
    if name.endswith(CODE) and not with_code:
        return "code"
    return "" if path.stat().st_size else "empty"
