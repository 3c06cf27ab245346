"""vLLM's own offloading as one of several KV connectors.

vLLM's arguments `kv_offloading_size` and `kv_offloading_backend` put one connector in the place of
all that are configured: whoever combines connectors has to add it in their stead.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvmesh.worker.engines.vllm.transfer_config import connectors_of

_Config = dict[str, Any]
SIZE, BACKEND = "kv_offloading_size", "kv_offloading_backend"
NATIVE, SIMPLE, LMCACHE = "OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector"
BYTES, DESCRIBED, LAZY = "cpu_bytes_to_use", "self_describing_kv_events", "lazy_offload"
BACKENDS = ("native", "lmcache")
EXTRA, SECONDARY = "kv_connector_extra_config", "secondary_tiers"
_EVENTS: _Config = {"enable_kv_events": True}
_TOLD: dict[str, _Config] = {"fs": _EVENTS, "obj": {**_EVENTS, "locality": "REMOTE"}}


def with_offloading(
    configured: _Config | None, gibibytes: float, backend: str, simple: bool
) -> list[_Config]:
    """The configured connectors, and the one that vLLM makes of its two arguments.

    `simple` is vLLM's variable `VLLM_USE_SIMPLE_KV_OFFLOAD`. If that connector is configured
    already, it gets the size, as with vLLM.
    """
    native = backend == "native"
    name = (SIMPLE if simple else NATIVE) if native else LMCACHE
    extra = {BYTES: gibibytes * (1 << 30)} if native else {}
    connectors = connectors_of(configured)
    if all(connector.get("kv_connector") != name for connector in connectors):
        return [*connectors, {"kv_connector": name, "kv_role": "kv_both", EXTRA: extra}]
    return [
        {**connector, EXTRA: {**(connector.get(EXTRA) or {}), **extra}}
        if connector.get("kv_connector") == name
        else connector
        for connector in connectors
    ]


def described(connectors: Iterable[_Config]) -> list[_Config]:
    """The connectors; vLLM's offloading tells of its blocks unless it is told not to.

    That is, their tokens, those in secondary tiers too, and that objects are remote.
    """
    return [
        {**connector, EXTRA: _described(connector.get(EXTRA) or {})}
        if connector.get("kv_connector") == NATIVE
        else connector
        for connector in connectors
    ]


def _described(extra: _Config) -> _Config:
    found = {DESCRIBED: True, **extra}
    if tiers := extra.get(SECONDARY):
        found[SECONDARY] = [
            {**_TOLD.get(str(tier.get("type")), {}), **tier} if isinstance(tier, dict) else tier
            for tier in tiers
        ]
    return found


def is_lazy(connectors: Iterable[Mapping[str, Any]]) -> bool:
    """True if a connector follows the order of eviction in vLLM's own queue of free blocks."""
    return any((connector.get(EXTRA) or {}).get(LAZY) for connector in connectors)
