"""vLLM's arguments for LoRA adapters."""

from typing import Any

from kvmesh.worker.engine import EngineConfigError


def lora_arguments(
    arguments: dict[str, Any], configured: int, max_adapters: int, on_cpu: bool
) -> dict[str, Any]:
    """`arguments` with those that `configured` adapters and loading at run time need.

    vLLM reads an adapter again from its folder after it has evicted it, and dies if the folder is
    gone. So its host memory must hold all of them, and one more while it is replaced. On a CPU,
    vLLM computes requests without an adapter with the last slot if others in the batch have one, so
    that slot must stay empty. Raises EngineConfigError if the given arguments allow neither.
    """
    if not configured and not max_adapters:
        return arguments
    held = max(configured, max_adapters) + (1 if max_adapters else 0)
    slots = held + 1 if on_cpu else max(configured, max_adapters)
    max_loras = arguments.get("max_loras", slots)
    max_cpu_loras = arguments.get("max_cpu_loras", max(held, max_loras))
    if max_cpu_loras < held:
        raise EngineConfigError(
            f"vLLM's max_cpu_loras is {max_cpu_loras}; {held} adapters may be loaded at once"
        )
    if on_cpu and max_loras < slots:
        raise EngineConfigError(
            f"vLLM's max_loras is {max_loras}; on a CPU it must be at least {slots}"
        )
    return {
        "enable_lora": True,
        **arguments,
        "max_loras": max_loras,
        "max_cpu_loras": max_cpu_loras,
    }
