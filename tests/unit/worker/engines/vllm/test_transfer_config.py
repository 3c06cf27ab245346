"""vLLM's `kv_transfer_config`: which of its connectors hand KV off, and in which directions."""

from typing import Any

import pytest

from kvmesh.worker.engines.vllm.transfer_config import (
    PACKAGE,
    combined_config,
    has_handoff,
    serves_any_role,
)

OURS = {"kv_connector": "K", "kv_role": "kv_both", "kv_connector_module_path": f"{PACKAGE}.k"}


def nixl(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role}


@pytest.mark.parametrize(
    ("config", "handoff", "any_role"),
    [
        (None, False, False),
        (OURS, False, False),
        (nixl("kv_both"), True, True),
        (nixl("kv_producer"), True, False),
        (combined_config(nixl("kv_both"), OURS), True, True),
        (combined_config(nixl("kv_consumer"), OURS), True, False),
        (combined_config(combined_config(nixl("kv_both"), nixl("kv_producer"))), True, False),
    ],
)
def test_a_connector_with_both_kv_roles_serves_any_role(
    config: dict[str, Any] | None, handoff: bool, any_role: bool
) -> None:
    assert has_handoff(config) == handoff
    assert serves_any_role(config) == any_role
