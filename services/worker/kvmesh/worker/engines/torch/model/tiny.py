"""Writes a tiny model with random weights and the tokenizer of the demo."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kvmesh.demo import model_dir

CONTEXT = 4096


def make_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a Llama of 0.7 M random parameters (3 MB), the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = model_dir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config())
    model.save_pretrained(folder)
    shutil.copyfile(demo / "generation_config.json", folder / "generation_config.json")


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,  # the smallest that every engine's attention supports
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=[8184, 8182],
        pad_token_id=8182,
        bos_token_id=None,
    )
