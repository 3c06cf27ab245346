"""A tiny model with random weights for the torch engine, made once per test run."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_kept: list[TemporaryDirectory[str]] = []


@cache
def tiny_model(seed: int = 0) -> Path:
    """The folder of a model; another seed gives other weights."""
    from kvmesh.worker.engines.torch.model.tiny import make_tiny_model

    _kept.append(TemporaryDirectory(prefix="kvmesh-tiny-"))
    folder = Path(_kept[-1].name)
    make_tiny_model(folder, seed)
    return folder
