"""A LoRA adapter in PEFT's format for engines that do not compute with it."""

import json
from pathlib import Path

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def write_adapter(folder: Path, content: int = 1, **config: object) -> Path:
    """Write an adapter with one tensor of 16 equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"base_model.q_proj.lora_A.weight": tensor}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes([content]) * 16
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder
