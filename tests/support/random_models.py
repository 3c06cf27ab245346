"""Tiny models with random weights of the architectures that agents' models have."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.utils import logging as transformers_logging

from kvmesh.demo import model_dir

VOCABULARY = 8192
# large weights: with the usual ones all logits would be about equal
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "eos_token_id": 8184,
    "pad_token_id": 8182,
    "bos_token_id": None,
}


def make_attention_model(folder: Path, seed: int = 0) -> None:
    """Write a Qwen 2 of four layers with full attention and large linear layers."""
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=16384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **COMMON,
    )
    _write(Qwen2ForCausalLM, config, folder, seed)


def make_tied_model(folder: Path, seed: int = 0) -> None:
    """Write a Llama of two layers whose output layer is its embedding."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        **COMMON,
    )
    _write(LlamaForCausalLM, config, folder, seed)


def make_experts_model(folder: Path, seed: int = 0) -> None:
    """Write a Qwen 3 of two layers, each with four experts."""
    config = Qwen3MoeConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        mlp_only_layers=[],
        **COMMON,
    )
    _write(Qwen3MoeForCausalLM, config, folder, seed)


def make_mla_model(folder: Path, seed: int = 0) -> None:
    """Write a DeepSeek V2 of three layers, of which none has experts."""
    config = DeepseekV2Config(
        hidden_size=128,
        intermediate_size=16384,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        **COMMON,
    )
    _write(DeepseekV2ForCausalLM, config, folder, seed)


def make_linear_attention_model(folder: Path, seed: int = 0) -> None:
    """Write a Mamba of two layers, which has states instead of KV."""
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        state_size=16,
        num_hidden_layers=2,
        eos_token_id=8184,
        pad_token_id=8182,
        bos_token_id=8183,
    )
    _write(MambaForCausalLM, config, folder, seed)


def make_hybrid_model(folder: Path, intermediate: int = 128, seed: int = 0) -> None:
    """Write a Qwen 3 Next of four layers, three with linear attention and one with full attention.

    Its heads are so large that a block of 32 tokens has as much KV as a state has bytes: vLLM would
    enlarge the blocks otherwise. Its states decay slowly, and its linear layers add little to them:
    what a prompt began with shows in the logits.
    """
    config = Qwen3NextConfig(
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        mlp_only_layers=[0, 1, 2],
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **COMMON,
    )
    _write(Qwen3NextForCausalLM, config, folder, seed, _remember)


def make_sliding_window_model(
    folder: Path, window: int, intermediate: int = 128, seed: int = 0
) -> None:
    """Write a Gemma 2 of four layers, alternately with a sliding window and full attention."""
    config = Gemma2Config(
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=window,
        **COMMON,
    )
    _write(Gemma2ForCausalLM, config, folder, seed)


def make_unlike_layers_model(
    folder: Path, window: int, intermediate: int = 128, seed: int = 0
) -> None:
    """Write a Gemma 4 of four layers; those with full attention have larger heads."""
    config = Gemma4TextConfig(
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        sliding_window=window,
        **COMMON,
    )
    _write(Gemma4ForCausalLM, config, folder, seed)


def _remember(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.fill_(-6.0)
        elif name.endswith("mlp.down_proj.weight"):
            weight.data *= 0.02


def _write(
    architecture: Any,
    config: Any,
    folder: Path,
    seed: int,
    adjust: Callable[[Any], None] = lambda _: None,
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = architecture(config)
    adjust(model)
    folder.mkdir(parents=True, exist_ok=True)
    demo = model_dir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    shutil.copyfile(demo / "generation_config.json", folder / "generation_config.json")
