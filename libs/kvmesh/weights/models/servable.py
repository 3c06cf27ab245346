"""The check that workers can serve a model folder, before it is pushed."""

import json
import re
from pathlib import Path
from typing import Any

from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.storage.tokenizer_file import tokenizer_json
from kvmesh.weights.checkpoint import CONFIG, INDEX, MAX_INDEX, PATTERN
from kvmesh.weights.errors import CheckpointError
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.folder import OTHER_WEIGHTS, FolderContent

CONVERT = "the mesh holds safetensors: convert them, or download the model in this format"
_OTHER_INDEX = "*.index*.json"
_TRAINING = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler)\b.*")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def check_servable(folder: Path, content: FolderContent) -> None:
    """Raise CheckpointError if no engine could serve what a push of the folder would store.

    A folder without any weights is servable, by engines that read none.
    """
    _check_config(folder)
    _check_tokenizer(folder)
    if content.weights is None:
        _check_absence(folder)
    else:
        _check_weights(folder, content.weights)


def _check_config(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no {CONFIG}")
    _object(folder / CONFIG)


def _check_tokenizer(folder: Path) -> None:
    try:
        tokenizer = json.loads(tokenizer_json(folder))
    except ModelFilesError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} has a tokenizer.json that is no JSON: {error}") from error
    if not isinstance(tokenizer, dict) or "model" not in tokenizer:
        raise CheckpointError(f"{folder} has a tokenizer.json without a model")


def _check_absence(folder: Path) -> None:
    """Refuse a folder whose weights are elsewhere, or in a form that a push leaves out."""
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        raise CheckpointError(f"{folder} has none of the files that {INDEX} names: {_few(names)}")
    names = sorted(path.name for path in folder.iterdir() if _is_weights(path))
    if names:
        raise CheckpointError(f"{folder} has weights only as {_few(names)}; {CONVERT}")
    indices = sorted(path.name for path in folder.glob(_OTHER_INDEX))
    if indices:
        raise CheckpointError(f"{folder} has {indices[0]} without the weights that it names")


def _is_weights(path: Path) -> bool:
    """True for a file, or a link to one that is missing, with weights in any form."""
    known = path.match(PATTERN) or path.name.endswith(OTHER_WEIGHTS)
    return known and not path.is_dir() and not _TRAINING.fullmatch(path.name)


def _check_weights(folder: Path, weights: Manifest) -> None:
    """Refuse weights that lack tensors of their index, or files of their series."""
    places = {tensor.name: weights.files[tensor.file].name for tensor in weights.tensors}
    if not places:
        raise CheckpointError(f"{folder} has safetensors files without tensors")
    if (folder / INDEX).is_file():
        named = _weight_map(folder)
        missing = [name for name, file in named.items() if places.get(name) != file]
        if missing:
            where = named[missing[0]]
            raise CheckpointError(f"{where} has no tensor {missing[0]}, which {INDEX} has there")
        return
    present = {file.name for file in weights.files}
    for name in sorted(present):
        if found := _SHARD.fullmatch(name):
            stem, number, count = found.groups()
            series = (
                f"{stem}-{n:0{len(number)}}-of-{count}.safetensors"
                for n in range(1, int(count) + 1)
            )
            if absent := next((each for each in series if each not in present), None):
                raise CheckpointError(f"{folder} has no {absent}, which belongs to {name}")


def _weight_map(folder: Path) -> dict[str, str]:
    places = _object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    return places


def _object(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as source:
            found = json.loads(source.read(MAX_INDEX))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{file} is no JSON object with content")
    return found


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
