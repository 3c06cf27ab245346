"""Stores below an engine's memory from which it loads blocks itself, and how each is cleared.

vLLM 0.32: `reset_cache` of its KV connectors, which counts as a success where a connector lacks it.
SGLang 0.5.23: `mem_cache/storage`; `/hicache/storage-backend/clear` replies 200 for backends that
have nothing to clear with, and for LMCache whatever that replies.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from kvmesh.bus.messages import Clear
from kvmesh.worker.clearing import (
    DISK,
    ENGINE,
    HOST,
    NO_NAMESPACE,
    REMOTE,
    UNCLEARED_SHARE,
    ClearOutcome,
    named_tiers,
)
from kvmesh.worker.engine import CLEAR_S

MULTI = "MultiConnector"
LOWER = (HOST, DISK, REMOTE)
RETRY_S = 0.5
UNCONFIRMED = "SGLang does not tell whether LMCache has cleared it"
_CLEARABLE = {
    "OffloadingConnector": HOST,
    "SimpleCPUOffloadConnector": HOST,
    "MooncakeStoreConnector": REMOTE,
}
_WITHOUT_STORE = {
    *("KvmeshConnector", "KvmeshRetentionConnector"),  # blocks of a kvbm are cleared there
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"),
    *("MoRIIOConnector", "P2pNcclConnector", "DecodeBenchConnector"),
    *("ExampleHiddenStatesConnector", "HiSparseConnector"),
}
# Secondary tiers of vLLM's offloading: files and objects, which may be remote, and others.
STORAGE = {"fs", "obj"}
_SECONDARY = {"example": (HOST,), "p2p": (REMOTE,)}
_HICACHE = {
    "file": DISK,
    **dict.fromkeys(("mooncake", "npu_memcache", "hf3fs", "seaweedfs", "mori"), REMOTE),
}


class EngineStore(NamedTuple):
    """A store of blocks in `tiers`; `clears` if its engine can empty it, and `confirms` it."""

    name: str
    tiers: tuple[int, ...]
    clears: bool
    confirms: bool = True


def vllm_stores(config: Mapping[str, Any] | None) -> list[EngineStore]:
    """The stores of a `kv_transfer_config`, in the order of its connectors."""
    if not config:
        return []
    name = str(config.get("kv_connector") or "")
    extra = config.get("kv_connector_extra_config") or {}
    if name == MULTI:
        return [store for one in extra.get("connectors", ()) for store in vllm_stores(one)]
    if not name or name in _WITHOUT_STORE:
        return []
    if name not in _CLEARABLE:
        return [EngineStore(name, LOWER, clears=False)]
    lower = [
        EngineStore(f"the {tier.get('type')} tier of {name}", _secondary(tier), clears=False)
        for tier in extra.get("secondary_tiers") or ()
    ]
    on_disk = name == "SimpleCPUOffloadConnector" and extra.get("kv_offload_backend") == "disk"
    return [EngineStore(name, (DISK if on_disk else _CLEARABLE[name],), clears=True), *lower]


def is_remote(tier: Mapping[str, Any]) -> bool:
    """True for a secondary tier of vLLM's offloading that its configuration calls remote."""
    return str(tier.get("locality") or "").upper() == "REMOTE"


def _secondary(tier: Mapping[str, Any]) -> tuple[int, ...]:
    """The tiers of the index in which the events of a secondary tier put its blocks."""
    kind = tier.get("type")
    if kind in STORAGE:
        return (REMOTE,) if is_remote(tier) else (DISK,)
    return _SECONDARY.get(str(kind), LOWER)


def not_clearable(stores: Iterable[EngineStore], command: Clear) -> dict[int, str]:
    """`ClearOutcome.kept` of the stores in named tiers that their engine cannot clear."""
    tiers, kept = named_tiers(command), dict[int, str]()
    for store in stores:
        if command.salt is not None or not store.clears:
            why = "cannot be cleared" if command.salt is None else f"holds blocks: {NO_NAMESPACE}"
            kept |= {tier: f"{store.name} {why}" for tier in store.tiers if tier in tiers}
    return kept


async def clear_vllm(
    stores: Iterable[EngineStore], command: Clear, reset: Callable[[bool], Awaitable[bool]]
) -> ClearOutcome:
    """Clear a vLLM as a whole by `reset`, with True its clearable stores too; False if it fails.

    vLLM empties its memory only when nothing uses a block: `reset` is tried for CLEAR_S.
    """
    stores, tiers = list(stores), named_tiers(command)
    kept = not_clearable(stores, command)
    named = [store for store in stores if store.clears and store.tiers[0] in tiers]
    if command.salt is not None:
        return ClearOutcome(0, kept | ({ENGINE: NO_NAMESPACE} if ENGINE in tiers else {}))
    lower = [store.tiers[0] for store in named]
    if ENGINE not in tiers:
        why = "vLLM clears it with tier 0 only: name that tier, too"
        return ClearOutcome(0, kept | dict.fromkeys(lower, why))
    clock = asyncio.get_running_loop().time
    until = clock() + CLEAR_S
    while not await reset(bool(named)):
        if clock() >= until:
            if named and await reset(False):
                names = " and ".join(store.name for store in named)
                return ClearOutcome(0, kept | dict.fromkeys(lower, f"{names} did not clear it"))
            return ClearOutcome(0, kept | dict.fromkeys((ENGINE, *lower), UNCLEARED_SHARE))
        await asyncio.sleep(RETRY_S)
    return ClearOutcome(0, kept)


def sglang_stores(arguments: Mapping[str, Any]) -> list[EngineStore]:
    """The storage below the host memory of SGLang with these `ServerArgs`."""
    if arguments.get("enable_lmcache"):
        return [EngineStore("LMCache", LOWER, clears=True, confirms=False)]
    backend = arguments.get("hicache_storage_backend")
    if not backend:
        return []
    tier = _HICACHE.get(backend, REMOTE)
    return [EngineStore(f"SGLang's storage {backend}", (tier,), backend in _HICACHE)]


async def clear_sglang(
    arguments: Mapping[str, Any],
    command: Clear,
    flush: Callable[[], Awaitable[str]],
    clear_storage: Callable[[], Awaitable[str]],
) -> ClearOutcome:
    """Clear an SGLang with these `ServerArgs`; both calls return the reason if they fail.

    `flush` empties engine and host memory together, once nothing runs.
    """
    tiers, stores = named_tiers(command), sglang_stores(arguments)
    own = (ENGINE, HOST) if arguments.get("enable_hierarchical_cache") else (ENGINE,)
    named = [tier for tier in own if tier in tiers]
    kept = not_clearable(stores, command)
    if command.salt is not None:
        return ClearOutcome(0, kept | dict.fromkeys(named, NO_NAMESPACE))
    if named and len(named) < len(own):
        why = "SGLang clears tiers 0 and 1 together only: name both"
        kept |= dict.fromkeys(named, why)
    elif named and (why := await flush()):
        kept |= dict.fromkeys(named, why)
    for store in stores:
        kept |= await _clear_storage(store, tiers, clear_storage)
    return ClearOutcome(0, kept)


async def _clear_storage(
    store: EngineStore, tiers: Container[int], clear_storage: Callable[[], Awaitable[str]]
) -> dict[int, str]:
    named = [tier for tier in store.tiers if tier in tiers]
    if not named or not store.clears:
        return {}
    why = await clear_storage() or ("" if store.confirms else UNCONFIRMED)
    return dict.fromkeys(named, why) if why else {}
