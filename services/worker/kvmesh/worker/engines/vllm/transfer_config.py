"""vLLM's `kv_transfer_config` for several KV connectors at once."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

MULTI = "MultiConnector"
PACKAGE = "kvmesh.worker.engines.vllm"
MULTI_MODULE = f"{PACKAGE}.connectors.multi"
ConnectorConfig: TypeAlias = Mapping[str, Any]


def combined_config(*connectors: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of all these connectors, at least one.

    vLLM queries them in this order, and the first that has a prompt's blocks loads them. A single
    one of kvmesh's stays alone; others are in kvmesh's `MultiConnector`, which reports the tier of
    the tokens that they load.
    """
    if len(connectors) == 1 and is_ours(connectors[0]):
        return connectors[0]
    return {
        "kv_connector": MULTI,
        "kv_connector_module_path": MULTI_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def connectors_of(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The configuration of each connector in a `kv_transfer_config`."""
    if not config:
        return []
    if config.get("kv_connector") != MULTI:
        return [config]
    return list((config.get("kv_connector_extra_config") or {}).get("connectors") or ())


def transfer_config_of(config: Any) -> dict[str, Any] | None:
    """The `kv_transfer_config` that vLLM uses, from its `VllmConfig`; None without one."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    return {
        "kv_connector": transfer.kv_connector,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }


def is_multi(config: dict[str, Any] | None) -> bool:
    """True for several connectors, or others than kvmesh's."""
    return config is not None and config.get("kv_connector") == MULTI


def tells_tiers(config: dict[str, Any] | None) -> bool:
    """True for kvmesh's `MultiConnector` with others than kvmesh's connectors."""
    return config is not None and config.get("kv_connector_module_path") == MULTI_MODULE


def is_ours(connector: ConnectorConfig) -> bool:
    """True for a connector of kvmesh's, which is named by its module."""
    return str(connector.get("kv_connector_module_path") or "").startswith(f"{PACKAGE}.")


def lost_connectors(given: dict[str, Any] | None, used: dict[str, Any] | None) -> list[str]:
    """The names of the connectors in `given` that are not in `used`."""
    left = [(c.get("kv_connector"), c.get("kv_connector_module_path")) for c in connectors_of(used)]
    return [
        str(connector.get("kv_connector"))
        for connector in connectors_of(given)
        if (connector.get("kv_connector"), connector.get("kv_connector_module_path")) not in left
    ]


def handing_off(
    config: dict[str, Any] | None, hands_off: Callable[[ConnectorConfig], bool]
) -> list[dict[str, Any]]:
    """The connectors of `config` by which one engine fetches the KV of another's prompt."""
    return [connector for connector in connectors_of(config) if hands_off(connector)]


def serves_any_role(handing: list[dict[str, Any]]) -> bool:
    """True if each connector that hands KV off both sends and receives it."""
    return bool(handing) and all(connector.get("kv_role") == "kv_both" for connector in handing)
