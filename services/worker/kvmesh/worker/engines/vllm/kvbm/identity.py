"""The identity of vLLM's KV besides the weights: vLLM's version, the device and the backend."""

from typing import Any

import torch
from vllm import __version__
from vllm.platforms import current_platform


def engine_identity(config: Any) -> str:
    """Version, device and attention backend, in words; the same in all processes of an engine.

    A backend determines the arrangement of a block. Which one vLLM chooses by default depends on
    the device; on a CPU, even the arrangement does.
    """
    attention = config.attention_config
    chosen = {"": attention.backend, **attention.backend_per_kind}
    backends = [f"{kind} {b.name}".strip() for kind, b in sorted(chosen.items()) if b is not None]
    return ", ".join([f"vLLM {__version__} on {_device()}", *backends])


def _device() -> str:
    if current_platform.is_cpu():
        extension = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
        return f"cpu {torch.backends.cpu.get_cpu_capability()}{extension}"
    capability = current_platform.get_device_capability()
    version = f" {capability.as_version_str()}" if capability is not None else ""
    return f"{current_platform.device_type}{version}"
