"""A LoRA adapter for the tiny model, with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
HIDDEN, OUT = 64, {"q_proj": 128, "v_proj": 64}
LAYERS = 2


def make_adapter(folder: Path, seed: int = 1) -> Path:
    """Write a PEFT adapter that changes the model's output."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "target_modules": list(OUT),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, size in OUT.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
