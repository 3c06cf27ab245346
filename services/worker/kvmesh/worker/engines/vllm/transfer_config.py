"""vLLM's `kv_transfer_config` for several KV connectors at once."""

from typing import Any

MULTI = "MultiConnector"
PACKAGE = "kvmesh.worker.engines.vllm"


def combined_config(configured: dict[str, Any] | None, *ours: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of all connectors: the configured ones, then `ours`.

    vLLM queries them in this order, and the first that has a prompt's blocks loads them.
    """
    connectors = [*connectors_of(configured), *ours]
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": MULTI,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def connectors_of(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The configuration of each connector in a `kv_transfer_config`."""
    if not config:
        return []
    if config.get("kv_connector") != MULTI:
        return [config]
    return list(config.get("kv_connector_extra_config", {}).get("connectors", ()))


def has_handoff(config: dict[str, Any] | None) -> bool:
    """True if a connector in `config` is not one of kvmesh's: it transfers KV between engines."""
    return bool(_handing_off(config))


def serves_any_role(config: dict[str, Any] | None) -> bool:
    """True if each connector that transfers KV between engines both sends and receives it."""
    found = _handing_off(config)
    return bool(found) and all(connector.get("kv_role") == "kv_both" for connector in found)


def _handing_off(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [
        connector
        for connector in connectors_of(config)
        if not str(connector.get("kv_connector_module_path", "")).startswith(PACKAGE)
    ]
