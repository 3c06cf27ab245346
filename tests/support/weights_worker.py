"""A worker in a process of its own, as far as its weights go: weights process, and torch engine."""

import asyncio
import logging
import shutil
from collections.abc import Mapping
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec import Struct

# what a worker of the model below imports
MODULES = (
    "kvmesh.worker.engines.torch.engine",
    "kvmesh.worker.weights",
    "transformers.models.llama.modeling_llama",
)
REPORT_S = 0.1


class StartOrder(Struct, frozen=True, kw_only=True):
    """A start of the model in `folder`; `env` holds settings, `output` is a log."""

    name: str
    instance: str
    folder: Path
    env: Mapping[str, str]
    output: Path
    shared: bool = True


class Loaded(Struct, frozen=True):
    """The engine has started: digest of its parameters and buffers, or why it has not."""

    digest: str = ""
    error: str = ""


class NoSink:
    """An engine's output, which nobody reads."""

    def output(self, deltas: Any) -> None: ...
    def events(self, rank: int, events: Any) -> None: ...
    def events_lost(self, rank: int, count: int) -> None: ...
    def failed(self, error: Any) -> None: ...


def run_worker(order: StartOrder, pipe: Connection) -> None:
    """Start, report Loaded, digests of weights and WeightsCounts, and end with the other side."""
    logging.basicConfig(filename=order.output, level=logging.INFO, force=True)
    asyncio.run(_run(order, pipe))


def write_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a Llama of random parameters in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvmesh.demo import model_dir

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=8184,
        pad_token_id=8182,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="3MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(model_dir() / name, folder / name)


def parameters_digest(folder: Path) -> str:
    """The digest of a model whose folder was read by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return _digest(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


async def _run(order: StartOrder, pipe: Connection) -> None:
    from kvmesh.settings import load
    from kvmesh.worker.engine import EngineContext, EngineError
    from kvmesh.worker.engines.torch.engine import TorchEngine
    from kvmesh.worker.weights import WorkerWeights

    settings = load(None, order.env, {})
    weights = None
    if order.shared:
        weights = WorkerWeights(settings, order.folder, order.name, order.instance)
        weights.tell(pipe.send)
        await weights.start()
    engine = TorchEngine(
        EngineContext(settings, order.folder, weights=weights.access if weights else None)
    )
    assert isinstance(engine, TorchEngine)
    try:
        await engine.start(NoSink())
        pipe.send(Loaded(_digest(engine._core.model.module)))
        if weights is not None:
            weights.engine_runs()
    except EngineError as error:
        pipe.send(Loaded(error=str(error)))
    told = None
    while not pipe.poll():
        if weights is not None and weights.counts != told:
            told = weights.counts
            pipe.send(told)
        await asyncio.sleep(REPORT_S)
    await engine.close()
    if weights is not None:
        await weights.close()


def _digest(module: Any) -> str:
    digest = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
