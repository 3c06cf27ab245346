"""vLLM's configuration with kvmesh's connectors, where vLLM alone would do less than it can.

Its arguments for offloading replace all configured connectors, and any connector makes it hash
blocks without a draft model's lookahead, for which it then gives up one block of each hit.
"""

from copy import copy
from typing import Any

from vllm import envs
from vllm.config import VllmConfig

from kvmesh.worker.engines.vllm.connectors.offloading import described, with_offloading
from kvmesh.worker.engines.vllm.transfer_config import (
    MULTI,
    MULTI_MODULE,
    connectors_of,
    transfer_config_of,
)

REWRITE, LOOKAHEAD = "_post_init_kv_transfer_config", "num_hash_lookahead_tokens"
EXTENDED = "_kvmesh_extended"


def extend_configuration(ours: set[str], transferless: str) -> None:
    """Extend vLLM's configuration in this process; a vLLM that differs stays as it is.

    `ours` are the names of kvmesh's connectors, `transferless` that of one that transfers nothing.
    """
    if getattr(VllmConfig, EXTENDED, False):
        return
    setattr(VllmConfig, EXTENDED, True)
    rewrite = getattr(VllmConfig, REWRITE, None)
    if rewrite is not None:

        def keep_connectors(config: Any) -> None:
            if not _add_offloading(config, ours):
                rewrite(config)
            _report_tiers(config, ours)

        setattr(VllmConfig, REWRITE, keep_connectors)
    lookahead = getattr(VllmConfig, LOOKAHEAD, None)
    if isinstance(lookahead, property) and lookahead.fget is not None:
        read = lookahead.fget

        def keep_lookahead(config: Any) -> int:
            if transfers_nothing(config, transferless):
                config = copy(config)
                config.kv_transfer_config = None
            tokens: int = read(config)
            return tokens

        setattr(VllmConfig, LOOKAHEAD, property(keep_lookahead))


def transfers_nothing(config: Any, transferless: str) -> bool:
    """True if the only connector of a `VllmConfig` transfers nothing."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == transferless


def _add_offloading(config: Any, ours: set[str]) -> bool:
    """Add vLLM's offloading to connectors of which one is kvmesh's; False if there is none."""
    cache, given = config.cache_config, transfer_config_of(config)
    if cache.kv_offloading_size is None or not _has_any(config, ours):
        return False
    connectors = with_offloading(
        given,
        cache.kv_offloading_size,
        cache.kv_offloading_backend,
        bool(envs.VLLM_USE_SIMPLE_KV_OFFLOAD),
    )
    transfer = config.kv_transfer_config
    transfer.kv_connector, transfer.kv_connector_module_path = MULTI, MULTI_MODULE
    transfer.kv_connector_extra_config = {"connectors": described(connectors)}
    transfer.kv_role = "kv_both"
    return True


def _report_tiers(config: Any, ours: set[str]) -> None:
    """Put kvmesh's `MultiConnector` in the place of vLLM's if one of its connectors is kvmesh's.

    Offloading beside it describes its blocks.
    """
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == MULTI and _has_any(config, ours):
        transfer.kv_connector_module_path = transfer.kv_connector_module_path or MULTI_MODULE
        extra, given = transfer.kv_connector_extra_config, connectors_of(transfer_config_of(config))
        transfer.kv_connector_extra_config = {**extra, "connectors": described(given)}


def _has_any(config: Any, ours: set[str]) -> bool:
    names = {
        connector.get("kv_connector") for connector in connectors_of(transfer_config_of(config))
    }
    return not names.isdisjoint(ours)
