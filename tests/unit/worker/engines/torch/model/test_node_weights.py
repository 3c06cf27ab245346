"""Models of the torch engine from a copy in the node's memory, and from an earlier start."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from support import tiny
from support.stored_weights import StoredWeights
from support.torch_core import BLOCK, PASS_TOKENS
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kvmesh.settings.schema import WeightsSettings
from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.engines.torch.model.loading import load_model
from kvmesh.worker.engines.torch.model.node_weights import ArrivingTensor, TorchWeights
from kvmesh.worker.engines.torch.model.paged_model import PagedModel
from kvmesh.worker.weights import kept_access

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "dtype": torch.bfloat16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SMALL)),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **SMALL)),
}


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    MODELS[request.param]().to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, weights: TorchWeights | None = None, dtype: str = "auto") -> PagedModel:
    return PagedModel(load_model(folder, dtype, "cpu", weights), BLOCK, PASS_TOKENS)


def alike(one: PagedModel, other: PagedModel) -> bool:
    first, second = one.module.state_dict(), other.module.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype
        for name in first
    )


def logits(model: PagedModel) -> torch.Tensor:
    tokens = torch.arange(1)
    return model._logits(tokens, tokens, tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_that_arrives_and_a_later_start_give_the_same_model(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    stored, expected = StoredWeights(tmp_path, folder), load(folder, dtype=dtype)
    stored.answer()
    access = stored.access(keep=True)
    with stored.arriving(pace_s=0.001):
        first = TorchWeights(access, folder)
        assert first.from_memory(torch.float32) is None
        loaded = load(folder, first, dtype)
    assert alike(loaded, expected)
    later = TorchWeights(access, folder)
    module = later.from_memory({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    assert module is not None
    kept = load(folder, later, dtype)
    assert alike(kept, expected)
    assert kept.layout == loaded.layout == expected.layout
    first.close()
    later.close()
    stored.copy.close()
    assert torch.equal(logits(kept), logits(expected))


def test_weights_on_the_disk_are_kept_too(folder: Path, tmp_path: Path) -> None:
    stored = StoredWeights(tmp_path, folder)
    stored.answer(disk="nobody has it")
    for count in (1, 2):
        weights = TorchWeights(stored.access(keep=True), folder)
        assert alike(load(folder, weights), load(folder)), count
        weights.close()
    assert [m.form for m in stored.store.list()].count("engine") == 1


def test_a_folder_without_weights_gets_them_from_a_copy(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = StoredWeights(tmp_path, folder)
    stored.answer()
    stored.arrive()
    weights = TorchWeights(stored.access(), bare)
    assert alike(load(bare, weights), load(folder))
    weights.close()
    stored.answer(disk="nobody has it")
    weights = TorchWeights(stored.access(), bare)
    with pytest.raises(EngineError, match="no other worker") as caught:
        load(bare, weights)
    assert not isinstance(caught.value, EngineConfigError), "a restart may help"
    weights.close()
    with pytest.raises(EngineConfigError, match="has no weights"):
        load(bare, None)


def test_tensors_are_read_while_others_are_on_their_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, missing = StoredWeights(tmp_path, folder), []
    stored.answer()
    read = ArrivingTensor.__getitem__

    def noted(tensor: ArrivingTensor, place: Any) -> torch.Tensor:
        found = read(tensor, place)
        missing.append(not stored.copy.complete)
        stored.arrive([last])
        return found

    monkeypatch.setattr(ArrivingTensor, "__getitem__", noted)
    weights = TorchWeights(stored.access(), folder)
    *others, last = range(len(stored.chunks))
    stored.arrive(others)
    assert alike(load(folder, weights), load(folder))
    weights.close()
    assert any(missing)
    assert len(missing) == len(stored.manifest.tensors)


def test_a_lost_copy_is_completed_from_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.weights.stored_copy.ORPHANED_S", 0.05)
    stored = StoredWeights(tmp_path, folder)
    stored.answer()
    stored.arrive([0])
    threading.Timer(0.1, stored.abandon).start()
    weights = TorchWeights(stored.access(keep=True), folder)
    assert alike(load(folder, weights), load(folder))
    weights.close()
    assert sorted(m.form for m in stored.store.list()) == ["checkpoint", "engine"]


def test_a_folder_of_other_weights_is_not_mixed_with_a_lost_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.weights.stored_copy.ORPHANED_S", 0.05)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (file,) = other.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1000:] = bytes(1000)
    file.write_bytes(content)
    stored = StoredWeights(tmp_path, folder)
    stored.answer()
    stored.arrive([0])
    stored.abandon()
    weights = TorchWeights(stored.access(keep=True), other)
    assert alike(load(other, weights), load(other))
    weights.close()
    assert [m.form for m in stored.store.list()] == ["checkpoint"]


def test_a_transformers_that_reads_otherwise_waits_for_all(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr(ArrivingTensor, "__getitem__")
    stored = StoredWeights(tmp_path, folder)
    stored.answer()
    weights = TorchWeights(stored.access(), folder)
    with stored.arriving(pace_s=0.001):
        assert alike(load(folder, weights), load(folder))
    weights.close()
    assert "the model waits for all" in caplog.text


def test_no_answer_means_the_folder(tmp_path: Path) -> None:
    folder = tiny.tiny_model()
    stored = StoredWeights(tmp_path, folder)
    weights = TorchWeights(stored.access(timeout_s=0.05), folder)
    assert alike(load(folder, weights), load(folder))
    weights.close()


def test_weights_are_kept_without_a_weights_process(folder: Path, tmp_path: Path) -> None:
    access = kept_access(WeightsSettings(keep=True, directory=tmp_path / "store"))
    assert access is not None
    first = TorchWeights(access, folder)
    load(folder, first)
    first.close()
    second = TorchWeights(access, folder)
    assert second.from_memory(torch.float32) is not None
    assert alike(load(folder, second), load(folder))
    second.close()
    assert kept_access(WeightsSettings()) is None
