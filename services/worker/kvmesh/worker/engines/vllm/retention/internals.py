"""The internals of vLLM that retention relies on beyond the documented hooks of KV connectors."""

import inspect
from typing import Any

from vllm import __version__ as vllm_version
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core, core_client
from vllm.v1.request import Request

METHODS: dict[str, tuple[Any, list[str]]] = {
    "popleft": (kv_cache_utils.FreeKVCacheBlockQueue, ["self"]),
    "popleft_n": (kv_cache_utils.FreeKVCacheBlockQueue, ["self", "n"]),
    "remove": (kv_cache_utils.FreeKVCacheBlockQueue, ["self", "block"]),
    "append": (kv_cache_utils.FreeKVCacheBlockQueue, ["self", "block"]),
    "append_n": (kv_cache_utils.FreeKVCacheBlockQueue, ["self", "blocks"]),
    "prepend_n": (kv_cache_utils.FreeKVCacheBlockQueue, ["self", "blocks"]),
    "get_all_free_blocks": (kv_cache_utils.FreeKVCacheBlockQueue, ["self"]),
    "evict_blocks": (block_pool.BlockPool, ["self", "block_ids"]),
    "reset_prefix_cache": (block_pool.BlockPool, ["self"]),
    "update_block_hashes": (Request, ["self"]),
    "call_utility_async": (core_client.AsyncMPClient, ["self", "method", "args"]),
}
# Methods of the queue that the retaining one replaces: vLLM may call no others.
QUEUE = {name for name, (owner, _) in METHODS.items() if owner.__name__.startswith("Free")}
BLOCK_FIELDS = {"block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block"}
QUEUE_FIELDS = {"num_free_blocks", "fake_free_list_head", "fake_free_list_tail"}
POOL_FIELDS = {
    "blocks",
    "num_gpu_blocks",
    "hash_block_size",
    "free_block_queue",
    "cached_block_hash_to_block",
}


def changed_internals() -> list[str]:
    """Describe each internal of the installed vLLM that differs from those that were tested."""
    found = [
        f"{owner.__name__}.{name}"
        for name, (owner, parameters) in METHODS.items()
        if _parameters(getattr(owner, name, None)) != parameters
    ]
    queue = kv_cache_utils.FreeKVCacheBlockQueue
    found += [f"{queue.__name__}.{name}" for name in _public_methods(queue) - QUEUE]
    try:
        pool = block_pool.BlockPool(4, True, 16)
    except Exception as error:  # any difference, whatever it raises
        return [*found, f"BlockPool: {error}"]
    found += [f"KVCacheBlock.{n}" for n in BLOCK_FIELDS if not hasattr(pool.blocks[0], n)]
    found += [f"BlockPool.{name}" for name in POOL_FIELDS if not hasattr(pool, name)]
    found += [
        f"{queue.__name__}.{n}" for n in QUEUE_FIELDS if not hasattr(pool.free_block_queue, n)
    ]
    if not hasattr(pool.cached_block_hash_to_block, "_cache"):
        found.append("BlockHashToBlockMap._cache")
    if "kv_event_publisher" not in inspect.getsource(Scheduler.__init__):
        found.append("Scheduler.kv_event_publisher")
    if "shared_prefix_boundary" not in inspect.getsource(Request.__init__):
        found.append("Request.shared_prefix_boundary")
    if not hasattr(core.EngineCore, "step"):
        found.append("EngineCore")
    return found


def no_retention(changed: list[str]) -> str:
    """The warning for a vLLM that differs."""
    return (
        f"vLLM {vllm_version} retains no blocks on request:"
        f" {', '.join(changed)} differ from the versions that were tested"
    )


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters) if function is not None else []


def _public_methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"} - {
        "iter_blocks_after"  # of vLLM's CPU offloading, which retention excludes
    }
