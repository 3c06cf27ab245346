"""Models with random weights for measurements, made where they run."""

from pathlib import Path
from typing import Any, Literal

import torch

from kvmesh.worker.models.tiny_model import make_tiny_model

Shape = Literal["30m", "700m", "8b"]
CONTEXT = 16384
SHAPES: dict[Shape, dict[str, int]] = {
    "30m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 4,
    },
    "700m": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "num_key_value_heads": 8,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
    },
}


def make_random_model(folder: Path, shape: Shape, device: str = "cuda") -> None:
    """Write a Llama in bfloat16 with the demo's tokenizer of 8,192 tokens, made on a device.

    `30m` has 16 KiB of KV per token, `700m` 1.4 GB of weights. `8b` has the layers of Llama 3.1 8B,
    7.0 G parameters and 128 KiB of KV per token.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    config: Any = LlamaConfig(
        vocab_size=8192,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=[8184, 8182],
        pad_token_id=8182,
        bos_token_id=None,
        dtype=torch.bfloat16,
        **SHAPES[shape],
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
