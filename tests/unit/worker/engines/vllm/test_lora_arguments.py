"""vLLM's arguments for adapters."""

from typing import Any

import pytest

from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.vllm.lora_arguments import lora_arguments


@pytest.mark.parametrize(
    ("given", "configured", "limit", "on_cpu", "loras", "cpu_loras"),
    [
        ({}, 2, 0, False, 2, 2),
        ({}, 2, 0, True, 3, 3),
        ({}, 0, 4, False, 4, 5),
        ({}, 0, 4, True, 6, 6),
        ({}, 3, 1, False, 3, 4),
        ({"max_loras": 2}, 0, 8, False, 2, 9),
        ({"max_loras": 20}, 0, 8, False, 20, 20),
        ({"max_cpu_loras": 30}, 0, 8, False, 8, 30),
    ],
)
def test_host_memory_holds_all_and_a_cpu_keeps_the_last_slot_empty(
    given: dict[str, Any],
    configured: int,
    limit: int,
    on_cpu: bool,
    loras: int,
    cpu_loras: int,
) -> None:
    found = lora_arguments(given, configured, limit, on_cpu)
    assert found == {"enable_lora": True, "max_loras": loras, "max_cpu_loras": cpu_loras}


def test_without_adapters_the_arguments_stay() -> None:
    assert lora_arguments({"enable_lora": True, "max_loras": 1}, 0, 0, True) == {
        "enable_lora": True,
        "max_loras": 1,
    }


@pytest.mark.parametrize(
    ("given", "on_cpu", "reason"),
    [
        ({"max_cpu_loras": 4}, False, "max_cpu_loras is 4; 5 adapters"),
        ({"max_loras": 5}, True, "max_loras is 5; on a CPU it must be at least 6"),
    ],
)
def test_too_small_arguments_are_refused(given: dict[str, Any], on_cpu: bool, reason: str) -> None:
    with pytest.raises(EngineConfigError, match=reason):
        lora_arguments(given, 0, 4, on_cpu)
