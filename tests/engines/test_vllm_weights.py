"""Weights of real vLLM from a copy that arrives, from an earlier start, and after a lost copy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.nats import NatsServer
from support.random_models import (
    make_attention_model,
    make_experts_model,
    make_mla_model,
    make_tied_model,
)
from support.stored_weights import StoredWeights
from support.vllm import VllmRun, prompt, work
from support.vllm_server import vllm_server
from support.wait import eventually
from support.weights import Agents

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Sampling
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.weights.answer import WeightsAccess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore"),
]
CHUNK = 1 << 20
Logprobs = list[dict[int, float]]
MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "tied": (make_tied_model, []),
    "experts": (make_experts_model, []),
    "MLA": (make_mla_model, []),
    "tensor parallel": (make_attention_model, ["tensor_parallel_size=2"]),
}


async def logprobs(model: Path, *args: str, weights: WeightsAccess | None = None) -> Logprobs:
    """Start vLLM; the log probabilities of the five likeliest tokens at each of eight positions."""
    run = await VllmRun.start(model, *args, weights=weights)
    try:
        sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)
        run.engine.submit(work("w", prompt(100), sampling=sampling))
        await eventually(lambda: run.sink.finish("w"), timeout=120, what="the output")
        return [row for delta in run.sink.deltas["w"] for row in delta.logprobs or []]
    finally:
        await run.engine.close()


def without_weights(model: Path, folder: Path) -> Path:
    """A copy of a model folder that lacks the weights."""
    bare = folder / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return bare


@pytest.mark.parametrize("name", list(MODELS))
async def test_a_copy_and_a_later_start_give_the_same_logits(name: str, tmp_path: Path) -> None:
    make, args = MODELS[name]
    make(tmp_path / "model")
    expected = await logprobs(tmp_path / "model", *args)
    assert len(expected) == 8
    bare = without_weights(tmp_path / "model", tmp_path)
    stored = StoredWeights(tmp_path, tmp_path / "model", CHUNK)
    stored.answer()
    with stored.arriving(pace_s=0.2):
        assert await logprobs(bare, *args, weights=stored.access(keep=True)) == expected
    forms = [m for m in stored.store.list() if m.form == "engine"]
    assert [(m.rank, m.ranks) for m in sorted(forms, key=lambda m: m.rank)] == [
        (rank, len(forms)) for rank in range(2 if args else 1)
    ]
    stored.forget()
    assert await logprobs(bare, *args, weights=stored.access(keep=True)) == expected


@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
async def test_a_lost_copy_is_completed_or_replaced_but_never_mixed(
    same: bool, tmp_path: Path
) -> None:
    make_attention_model(tmp_path / "model", seed=1)
    stored = StoredWeights(tmp_path, tmp_path / "model", CHUNK)
    folder = tmp_path / "model"
    if not same:
        folder = tmp_path / "other"
        make_attention_model(folder, seed=2)
    expected = await logprobs(folder)
    stored.answer()
    stored.arrive(range(len(stored.chunks) // 2))
    stored.abandon()
    assert await logprobs(folder, weights=stored.access(keep=True)) == expected


async def test_the_answer_may_be_the_disk(tmp_path: Path) -> None:
    make_tied_model(tmp_path / "model")
    stored = StoredWeights(tmp_path, tmp_path / "model", CHUNK)
    stored.answer(disk="nobody has it")
    first = await logprobs(tmp_path / "model", weights=stored.access(keep=True))
    assert first == await logprobs(tmp_path / "model", weights=stored.access(keep=True))
    assert [m.form for m in stored.store.list()].count("engine") == 1


async def test_a_server_takes_its_weights_from_the_mesh(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tied_model(tmp_path / "model")
    bare = without_weights(tmp_path / "model", tmp_path)
    bus = await Bus.connect(BusOptions(url=nats_server.url, namespace="weights"), "test")
    limits = StreamLimits()
    await ensure_streams(bus, limits)
    agents = Agents(bus, limits, tmp_path)
    worker = await agents.start("worker", tmp_path / "model")
    worker.process.engine_runs()
    await eventually(lambda: worker.digest, what="the worker knows its weights")
    await worker.join()
    env = {
        "KVMESH_NATS_URL": nats_server.url,
        "KVMESH_NATS_NAMESPACE": "weights",
        "KVMESH_WORKER_SERVED_NAME": worker.job.model,
        "KVMESH_WEIGHTS_DIRECTORY": str(tmp_path / "store"),
    }
    arguments = ("--load-format", "kvmesh", "--max-model-len", "512")
    with vllm_server(bare, tmp_path, *arguments, env=env) as server:
        await server.ready()
        await eventually(lambda: worker.counts.sent > 0, what="the worker has sent its weights")
    await agents.close()
    await bus.close()


async def test_a_server_without_variables_reads_the_folder(tmp_path: Path) -> None:
    make_tied_model(tmp_path / "model")
    arguments = ("--load-format", "kvmesh", "--max-model-len", "512")
    with vllm_server(tmp_path / "model", tmp_path, *arguments) as server:
        await server.ready()
        assert "there are no KVMESH_* variables" in server.log.read_text()
