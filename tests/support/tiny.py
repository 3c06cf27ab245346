"""Tiny models with random weights, made once per test run."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_kept: list[TemporaryDirectory[str]] = []


def _folder(name: str) -> Path:
    """A new folder of this name, under which a worker serves its model."""
    _kept.append(TemporaryDirectory(prefix="kvmesh-models-"))
    return Path(_kept[-1].name) / name


@cache
def tiny_model(seed: int = 0) -> Path:
    """The folder of a model; another seed gives other weights."""
    from kvmesh.worker.models.tiny_model import make_tiny_model

    folder = _folder("tiny")
    make_tiny_model(folder, seed)
    return folder


@cache
def slow_model(intermediate_size: int = 4096) -> Path:
    """A model with large linear layers: its blocks load faster than it computes them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvmesh.worker.models.tiny_model import make_tiny_model

    folder = _folder("slow")
    make_tiny_model(folder)
    config = LlamaConfig.from_pretrained(folder)
    config.intermediate_size = intermediate_size
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
