"""Folders of random weights as safetensors files."""

import json
import random
from pathlib import Path

CHUNK = 64 << 10


def make_weights(folder: Path, files: int = 2, tensors: int = 4, size: int = 200_000) -> Path:
    """Write `files` safetensors files of `tensors` random BF16 tensors with `size` bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        names = [f"layer.{number}.{tensor}" for tensor in range(tensors)]
        write_safetensors(folder / name, dict.fromkeys(names, size), seed=number)
        places |= dict.fromkeys(names, name)
    if files > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(path: Path, sizes: dict[str, int], seed: int = 0) -> None:
    """Write one file of random BF16 tensors, given by name and size in bytes."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(at)
    path.write_bytes(content)
