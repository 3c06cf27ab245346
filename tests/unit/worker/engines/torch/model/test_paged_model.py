"""Model folders of the torch engine: refusals, and log probabilities of several architectures."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from support.tiny import tiny_model
from support.torch_core import Driver, load, make_core, make_work
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)
from transformers import PreTrainedConfig as Config

from kvmesh.demo import model_dir
from kvmesh.worker.engine import EngineError


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), folder / "model"))


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(EngineError, match="no weights"):
        load(model_dir())


def test_weights_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    edit(folder, num_hidden_layers=3)
    with pytest.raises(EngineError, match=r"do not fit its config.*layers\.2"):
        load(folder)


def test_damaged_weights_are_reported(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(EngineError, match="cannot load the model"):
        load(folder)


def test_an_unknown_architecture_is_reported(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    edit(folder, model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    with pytest.raises(EngineError, match="nonesuch"):
        load(folder)


def test_dynamic_rope_scaling_is_refused(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    edit(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(EngineError, match="dynamic"):
        load(folder)


@pytest.mark.parametrize(
    "config",
    [
        FalconConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2),
    ],
)
def test_models_without_pageable_attention_are_refused(config: Config, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="cannot be paged"):
        load(tmp_path)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "gpt2": GPT2Config(
        vocab_size=300, n_embd=48, n_layer=2, n_head=3, n_positions=256, initializer_range=0.3
    ),
    "mistral, sliding window": MistralConfig(**SMALL, sliding_window=20),
    "gemma 2, soft caps": Gemma2Config(**SMALL, sliding_window=24, query_pre_attn_scalar=16),
    "mixtral, experts": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen 3": Qwen3Config(**SMALL),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_log_probabilities_of_other_architectures_equal_transformers(
    family: str, tmp_path: Path
) -> None:
    config: Config = FAMILIES[family]
    torch.manual_seed(4)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    tokens = [(7 * i + 3) % 300 for i in range(60)]
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, -1]
    driver = Driver(make_core(load(tmp_path), blocks=16, budget=24))
    driver.run(make_work("warm", tokens[:40], 1), make_work("a", tokens, 1, logprobs=5))
    best = torch.log_softmax(logits, -1).topk(5)
    (_, reported), *_ = driver.answer("a")
    expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert reported == {token: pytest.approx(value, abs=1e-3) for token, value in expected.items()}
