"""Compares vLLM's configuration with the arguments that it was made of: vLLM changes some."""

from typing import Any

from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.vllm.connectors.known import ignores_tenants
from kvmesh.worker.engines.vllm.transfer_config import (
    connectors_of,
    lost_connectors,
    transfer_config_of,
)

NO_CACHE, NO_EVENTS, NO_PRIORITY = "no_prefix_cache", "no_kv_events", "no_priority"
SHARED_TENANTS = "tenants_share_kv"


def check_connectors(given: dict[str, Any] | None, config: Any) -> None:
    """Raise EngineConfigError if vLLM uses other KV connectors than those that it was given."""
    lost = lost_connectors(given, transfer_config_of(config))
    if lost:
        used = [str(c["kv_connector"]) for c in connectors_of(transfer_config_of(config))]
        raise EngineConfigError(
            f"vLLM does not use {', '.join(lost)}: its other arguments or variables have replaced"
            f" the KV connectors by {', '.join(used) or 'none'}"
        )


def changed_arguments(arguments: dict[str, Any], config: Any) -> dict[str, str]:
    """A warning of each kind for what vLLM does not do although its arguments ask for it."""
    found: dict[str, str] = {}
    events, policy = config.kv_events_config, config.scheduler_config.policy
    if arguments.get("enable_prefix_caching") and not config.cache_config.enable_prefix_caching:
        found[NO_CACHE] = (
            "vLLM has turned prefix caching off for this model or platform: nothing is cached"
        )
    elif "kv_events_config" not in arguments and not (events and events.enable_kv_cache_events):
        found[NO_EVENTS] = "vLLM publishes no KV events: routers do not know what it has cached"
    if arguments.get("scheduling_policy", policy) != policy:
        found[NO_PRIORITY] = f"vLLM schedules by {policy}, not by {arguments['scheduling_policy']}"
    blind = [
        str(connector["kv_connector"])
        for connector in connectors_of(transfer_config_of(config))
        if ignores_tenants(connector)
    ]
    if blind:
        found[SHARED_TENANTS] = (
            f"tenants share the KV in {', '.join(blind)}, whose keys are of tokens alone"
        )
    return found
