"""Tiny models with random weights of the architectures that agents' models have."""

import shutil
from pathlib import Path

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.utils import logging as transformers_logging

from kvmesh.demo import model_dir

VOCABULARY = 8192


def make_sliding_window_model(folder: Path, window: int, seed: int = 0) -> None:
    """Write a Gemma 2 of four layers, alternately with a sliding window and full attention."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=window,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=8184,
        pad_token_id=8182,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _write(Gemma2ForCausalLM(config), folder)


def _write(model: torch.nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    demo = model_dir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)  # type: ignore[operator]
    shutil.copyfile(demo / "generation_config.json", folder / "generation_config.json")
