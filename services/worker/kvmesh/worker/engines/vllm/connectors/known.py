"""Abilities of the KV connectors that vLLM's configuration names."""

import logging
from typing import Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvmesh.worker.engines.vllm.transfer_config import ConnectorConfig, is_ours

log = logging.getLogger(__name__)
# Answers without an address of the prompt's KV: both sides need a proxy that names a transfer.
PROXIED = {"MooncakeConnector"}
# Their keys are made of the tokens alone, without the salt that vLLM's block hashes have.
TENANT_BLIND = {"LMCacheConnectorV1", "HF3FSKVConnector", "ExampleConnector"}


def hands_off(connector: ConnectorConfig) -> bool:
    """True if one engine can fetch the KV of a prompt from the engine that has computed it.

    Such a connector names a peer as the source of its hits, and its answers have the address.
    """
    kind = connector_class(connector)
    if kind is None or is_ours(connector):
        return False
    from_peer = getattr(kind, "_cache_hit_source", None) is CacheHitSource.P2P
    return from_peer and PROXIED.isdisjoint(_names(kind))


def ignores_tenants(connector: ConnectorConfig) -> bool:
    """True if a connector is known to find the KV of one tenant for another."""
    kind = connector_class(connector)
    return kind is not None and not TENANT_BLIND.isdisjoint(_names(kind))


def connector_class(connector: ConnectorConfig) -> type[Any] | None:
    """The class that vLLM takes for a connector; None if it finds none."""
    fields = ("kv_connector", "kv_connector_module_path", "kv_role")
    named = {name: connector[name] for name in fields if connector.get(name)}
    try:
        found: type[Any] = KVConnectorFactory.get_connector_class(KVTransferConfig(**named))
    except Exception as error:  # modules of others, which vLLM imports when it starts
        log.warning("no class of the connector %s: %s", named.get("kv_connector"), error)
        return None
    return found


def _names(kind: type[Any]) -> set[str]:
    return {base.__name__ for base in kind.__mro__}
