"""A small cache of SGLang with its real classes, driven as its scheduler does, without a model."""

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from support.event_streams.keys import Key
from support.event_streams.stream import StreamWriter
from support.sglang_cpu import prepare

prepare()

from sglang.srt.disaggregation.kv_events import KVEventBatch  # noqa: E402
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402

ENCODER = msgspec.msgpack.Encoder()


class SmallCache:
    """A cache of `tokens` tokens; `hicache`, a write policy of HiCache, adds a host's memory."""

    def __init__(
        self,
        writer: StreamWriter,
        *,
        tokens: int,
        page: int,
        hicache: str | None = None,
        eagle: bool = False,
        pool: str = "mha",
        core: str = "rust",
        rank: int = 0,
        window: int = 0,
        **params: Any,
    ) -> None:
        self._writer, self._rank, self._page, self._eagle = writer, rank, page, eagle
        self._time = 0
        self.has_host, self.has_windows = hicache is not None, pool == "swa"
        arguments = {"page_size": page, "device": "cpu"}
        if hicache:
            arguments |= {
                "enable_hierarchical_cache": True,
                "hicache_write_policy": hicache,
                "hicache_ratio": 2.0,
                "hicache_size": 0,
            }
        self._context = get_context().override_server_args(**arguments)
        self._context.install()
        self.allocator, components = _allocator(pool, tokens, page, window)
        given = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            is_eagle=eagle,
            enable_kv_cache_events=True,
            tree_components=components,
            tree_core_backend=core if core in ("rust", "python") else None,
            sliding_window_size=window or None,
            **params,
        )
        self.names = given.kv_event_lora_names
        self.cache = {"radix": RadixCache, "windows": PureSWARadixCache}.get(
            core, UnifiedRadixCache
        )(given)
        if hicache:
            self.cache.init_hicache(get_context().server_args, given)
        self.flush()

    def close(self) -> None:
        self._context.restore()

    def insert(self, tokens: list[int], key: Key, priority: int = 0, session: str = "") -> None:
        """Insert the KV of a prompt and its answer, as at the end of a request."""
        radix = self._radix(tokens, key).page_aligned(self._page)
        if not len(radix):
            return
        slots = self._slots(len(radix))
        if slots is None:
            return
        params = InsertParams(key=radix, value=slots, priority=priority, session_id=session or None)
        found = self.cache.insert(params)
        if isinstance(self.cache, RadixCache):  # the other frees duplicates itself
            self.allocator.free(slots[: found.prefix_len])
        self.step()

    def load_back(self, tokens: list[int], key: Key) -> None:
        """Load the blocks of a prompt that only the host has."""
        found = self.cache.match_prefix(MatchPrefixParams(key=self._radix(tokens, key)))
        if found.host_hit_length:
            request = SimpleNamespace(
                rid="r",
                last_node=found.last_device_node,
                swa_host_hit_length=0,
                mamba_host_hit_length=0,
                kv=SimpleNamespace(mamba_pool_idx=None),
            )
            self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=found.best_match_node,
                    host_hit_length=found.host_hit_length,
                    mem_quota=None,
                    req=request,
                )
            )
            self.cache.ready_to_load_host_cache()
        self.step()

    def evict(self, tokens: int, windows: int = 0) -> None:
        """Evict KV of all layers, and KV of the layers with a window."""
        self.cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=windows))
        self.step()

    def evict_host(self, tokens: int) -> None:
        self.cache.evict_host(tokens)
        self.step()

    def reset(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self.flush()

    def step(self) -> None:
        if isinstance(self.cache, UnifiedRadixCache) and self.cache.cache_controller is not None:
            self.cache.check_hicache_events()
        self.flush()

    def flush(self) -> None:
        """Publish what has happened, as the scheduler does after each batch."""
        events = self.cache.take_events()
        if events:
            self._time += 1
            batch = KVEventBatch(float(self._time), events, self._rank)
            self._writer.message(ENCODER.encode(batch))

    def lookup(self, tokens: list[int], key: Key) -> None:
        found = self.cache.match_prefix(MatchPrefixParams(key=self._radix(tokens, key)))
        self._writer.lookup(tokens, key.salt, found.device_prefix_len, found.host_hit_length)
        self.flush()

    def _radix(self, tokens: list[int], key: Key) -> Any:
        return RadixKey(
            array("q", tokens), key.extra_key, is_bigram=self._eagle, cache_salt=key.cache_salt
        )

    def _slots(self, count: int) -> Any:
        slots = self.allocator.alloc(count)
        if slots is None:
            self.evict(count)
            slots = self.allocator.alloc(count)
        return slots


def _allocator(pool: str, tokens: int, page: int, window: int) -> tuple[Any, Any]:
    """The allocator over a pool of few bytes per token, and the components of the tree."""
    one = {"dtype": torch.float16, "device": "cpu", "enable_memory_saver": False}
    if pool == "swa":
        both = SWAKVPool(
            size=tokens,
            size_swa=tokens,
            page_size=page,
            head_num=1,
            head_dim=8,
            swa_attention_layer_ids=[1],
            full_attention_layer_ids=[0],
            enable_alt_stream=False,
            **one,
        )
        allocator = SWATokenToKVPoolAllocator(
            tokens, tokens, page, torch.float16, "cpu", both, False
        )
        return allocator, (ComponentType.FULL, ComponentType.SWA)
    if pool == "mla":
        kv = MLATokenToKVPool(tokens, page, kv_lora_rank=8, qk_rope_head_dim=8, layer_num=1, **one)
    else:
        kv = MHATokenToKVPool(
            tokens, page, head_num=1, head_dim=8, layer_num=1, enable_alt_stream=False, **one
        )
    if page == 1:
        paged = TokenToKVPoolAllocator(tokens, torch.float16, "cpu", kv, False)
    else:
        paged = PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", kv, False)
    return paged, (ComponentType.FULL,)
