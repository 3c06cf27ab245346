"""Clearing of the stores of a vLLM by a connector in its scheduler's process, between two steps."""

from typing import Any

from msgspec import Struct

from kvmesh.bus.messages import Clear
from kvmesh.worker.adapters.engine_stores import not_clearable, vllm_stores
from kvmesh.worker.clearing import DISK, HOST, REMOTE, named_tiers

_MEDIA = {HOST: "CPU", DISK: "DISK", REMOTE: "REMOTE"}


class MediumCleared(Struct, tag_field="type", tag="AllBlocksCleared"):
    """vLLM's event `AllBlocksCleared`, of one medium."""

    medium: str


def plain_config(transfer: Any) -> dict[str, Any] | None:
    """The connectors in vLLM's `KVTransferConfig`, as they were given; None without any."""
    if transfer is None:
        return None
    return {
        "kv_connector": transfer.kv_connector,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }


def clear_stores(scheduler: Any, command: Clear) -> tuple[dict[int, str], list[MediumCleared]]:
    """Clear the stores in the tiers that a command names.

    Returns `ClearOutcome.kept` of these tiers, and the events of those that are empty now, which
    follow all events of the stores so far. Of one namespace a store cannot clear the blocks.
    """
    stores = vllm_stores(plain_config(scheduler.vllm_config.kv_transfer_config))
    kept = not_clearable(stores, command)
    cleared = []
    tiers = named_tiers(command)
    connectors = _connectors(scheduler.connector)
    for store in stores:
        tier = store.tiers[0]
        if command.salt is not None or not store.clears or tier not in tiers:
            continue
        replies = [one.reset_cache() for one in connectors if _is_called(one, store.name)]
        if not replies or not all(replies):
            kept[tier] = f"{store.name} did not clear it"
        else:
            cleared.append(MediumCleared(_MEDIA[tier]))
    return kept, cleared


def _is_called(connector: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(connector).__mro__)


def _connectors(connector: Any) -> list[Any]:
    children = getattr(connector, "_connectors", None)  # of a MultiConnector
    if children is None:
        return [connector]
    return [one for child in children for one in _connectors(child)]
