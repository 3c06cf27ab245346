"""vLLM's KV connector to the kvbm of the node.

The scheduler polls `get_num_new_matched_tokens` until the lookup of a prompt is complete. The
worker copies the blocks found while other requests run; after each step it copies newly filled
blocks aside, and they are written through from the copies. The engine has one rank without tensor
or pipeline parallelism. Requests from outside the mesh bypass the connector.
"""

import logging
import time
from collections import Counter
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.worker.adapters.request_origin import KEY, OriginError, RequestOrigin, request_origin
from kvmesh.worker.engines.vllm.kvbm.bridge import (
    BridgeOptions,
    SchedulerBridge,
    WorkerBridge,
)
from kvmesh.worker.engines.vllm.kvbm.settings import CONNECTOR
from kvmesh.worker.engines.vllm.kvbm.stats import (
    COMPUTE,
    COPY,
    CORRUPT,
    LOADED,
    KvmeshConnectorStats,
    StepMeter,
)
from kvmesh.worker.engines.vllm.prometheus import UnexportedStats

log = logging.getLogger(__name__)


class BlockLoad(Struct):
    """vLLM blocks to fill from these offsets of the named arena."""

    request: str
    arena: str
    offsets: list[int]
    blocks: list[int]


class BlockSave(Struct):
    """vLLM blocks that hold the blocks of a prompt from `first` on after this step.

    `tokens` are the prompt's tokens up to the end of the last block.
    """

    request: str
    origin: RequestOrigin
    tokens: list[int]
    first: int
    blocks: list[int]


class KvmeshConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """Loads and saves of one step, and the number of prompt tokens that it computes."""

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.loads: list[BlockLoad] = []
        self.saves: list[BlockSave] = []


class ConnectorRequest:
    """A request in vLLM with its block ids; the first `saved_blocks` were loaded or saved."""

    def __init__(self, request: Any, origin: RequestOrigin) -> None:
        self.request = request
        self.origin = origin
        self.blocks: list[int] = []
        self.saved_blocks = 0


class KvmeshConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types here
    """Created once by the scheduler and once by the worker; each uses its half of the methods."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("vllm.kvbm needs an engine without tensor and pipeline parallelism")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = msgspec.convert(extra[KEY], BridgeOptions)
        self._layout = _layout(self._options.weights, kv_cache_config)
        self._block_size = self._layout.block_size
        self._scheduler: _SchedulerConnector | None = None
        self._bridge: WorkerBridge | None = None
        self._layers: list[Tensor] = []
        self._failed: set[int] = set()
        self._received: set[str] = set()
        self._meter = StepMeter()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerConnector(
                SchedulerBridge(self._options, self._layout), self._block_size
            )

    # scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_connector.get_num_new_matched_blocks(
            request, num_computed_tokens // self._block_size
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_connector.update_state_after_alloc(
            request, blocks, num_external_tokens // self._block_size
        )

    def build_connector_meta(self, scheduler_output: Any) -> KvmeshConnectorMetadata:
        return self._scheduler_connector.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        stats = connector_output.kv_connector_stats
        data = {} if stats is None else stats.data
        ours = data.get(CONNECTOR)  # of several connectors, by class name
        data = data if ours is None else ours.data
        if COMPUTE in data:
            self._scheduler_connector.bridge.update_speeds(data[COMPUTE], data[COPY])
        for request in connector_output.finished_recving or ():
            self._scheduler_connector.bridge.release_lookup(request)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_connector.request_finished(request.request_id)
        return False, None

    # both sides

    def get_kv_connector_stats(self) -> KvmeshConnectorStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self._meter.take(*self._bridge.counts) if self._bridge is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvmeshConnectorStats:
        return KvmeshConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> UnexportedStats:
        return UnexportedStats(*arguments)

    # worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._layers = list(kv_caches.values())
        held = sum(cache[0].numel() * cache.element_size() for cache in self._layers)
        if held != self._layout.block_bytes:
            raise ValueError(f"a block has {held} bytes, not {self._layout.block_bytes}")
        self._bridge = WorkerBridge(self._options, self._layout, self._layers[0].device)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._meter.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata.loads:
            host = self._worker_bridge.arena(load.arena)
            if host is None:
                self._failed.update(load.blocks)
            else:
                self._load(load.blocks, host, load.offsets)
            self._received.add(load.request)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        saved = False
        for save in self._metadata.saves:
            if not self._worker_bridge.has_capacity(len(save.blocks)):
                self._worker_bridge.count_skipped(len(save.blocks))
                continue
            rows = self._save(save.blocks)
            saved = True
            self._worker_bridge.write_through(
                save.request, save.origin, save.tokens, save.first, rows
            )
        if saved:  # the copies have synchronized with the device, so the step has ended
            self._meter.computed(self._metadata.prefill_tokens)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.bridge.close()
            self._scheduler = None
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None

    @property
    def _scheduler_connector(self) -> "_SchedulerConnector":
        if self._scheduler is None:
            raise RuntimeError("not created with the scheduler role")
        return self._scheduler

    @property
    def _worker_bridge(self) -> WorkerBridge:
        if self._bridge is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._bridge

    @property
    def _metadata(self) -> KvmeshConnectorMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, KvmeshConnectorMetadata):
            raise TypeError(f"unexpected connector metadata {type(metadata).__name__}")
        return metadata

    def _load(self, blocks: list[int], host: Tensor, offsets: list[int]) -> None:
        started_at = time.perf_counter()
        index, start = torch.tensor(blocks, device=self._layers[0].device), 0
        for cache in self._layers:
            size = cache[0].numel() * cache.element_size()
            parts = [host[offset + start : offset + start + size] for offset in offsets]
            values = torch.stack(parts).view(cache.dtype).view(len(blocks), *cache.shape[1:])
            cache[index] = values.to(cache.device)
            start += size
        self._meter.copied(start * len(blocks), time.perf_counter() - started_at)

    def _save(self, blocks: list[int]) -> Tensor:
        """Copy blocks to the host, one row each."""
        index = torch.tensor(blocks, device=self._layers[0].device)
        parts = [cache[index].flatten(1).view(torch.uint8) for cache in self._layers]
        return torch.cat(parts, 1).cpu()


class _SchedulerConnector:
    """Scheduler side: tracks requests and plans the loads and saves of each step."""

    def __init__(self, bridge: SchedulerBridge, block_size: int) -> None:
        self.bridge = bridge
        self._block_size = block_size
        self._requests: dict[str, ConnectorRequest] = {}
        self._held_blocks: dict[str, int] = {}
        self._loaded: dict[str, list[int]] = {}
        self._corrupt = 0
        self._loads: list[BlockLoad] = []

    def get_num_new_matched_blocks(self, request: Any, held: int) -> tuple[int | None, bool]:
        origin, reusable = _origin(request), (request.num_tokens - 1) // self._block_size
        if origin is None or reusable <= held:
            return 0, False
        tokens = request.all_token_ids[: reusable * self._block_size]
        found = self.bridge.lookup(request.request_id, origin, tokens, held)
        if found is None:
            return None, False
        self._held_blocks[request.request_id] = held
        return found * self._block_size, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None:
        request_id, origin = request.request_id, _origin(request)
        if origin is None:
            return
        self._requests.setdefault(request_id, ConnectorRequest(request, origin))
        held, found = self._held_blocks.pop(request_id, 0), self.bridge.begin_copy(request_id)
        block_ids = blocks.get_block_ids()[0][held : held + count]
        if count and found is None:  # expired: the load fails, and vLLM recomputes the blocks
            self._loads.append(BlockLoad(request_id, "", [], block_ids))
        elif count and found is not None:
            offsets, tiers = found.blocks_after(held)
            self._loads.append(
                BlockLoad(request_id, found.arena, offsets[:count].tolist(), block_ids)
            )
            blocks_of = Counter(tiers[:count])
            deepest = max(blocks_of)
            self._loaded[origin.request] = [blocks_of[n] for n in range(1, deepest + 1)]
        else:
            self.bridge.release_lookup(request_id)

    def build_meta(self, output: Any) -> KvmeshConnectorMetadata:
        metadata, cached = KvmeshConnectorMetadata(), output.scheduled_cached_reqs
        metadata.loads, self._loads = self._loads, []
        for new in output.scheduled_new_reqs:
            self._set_block_ids(new.req_id, new.block_ids[0], new.num_computed_tokens)
            self._schedule_saves(metadata, new.req_id, new.num_computed_tokens, output)
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request, blocks, computed in rows:
            fresh = blocks[0] if blocks is not None else []
            if request in cached.resumed_req_ids:
                self._set_block_ids(request, fresh, computed)
            elif request in self._requests:
                self._requests[request].blocks += fresh
            self._schedule_saves(metadata, request, computed, output)
        return metadata

    def take_stats(self) -> KvmeshConnectorStats | None:
        """Blocks loaded by request and tier, and corrupt blocks; None if nothing changed."""
        loaded, corrupt = self._loaded, self.bridge.corrupt
        if not loaded and corrupt == self._corrupt:
            return None
        self._loaded, self._corrupt = {}, corrupt
        return KvmeshConnectorStats({LOADED: loaded, CORRUPT: corrupt})

    def request_finished(self, request: str) -> None:
        self._held_blocks.pop(request, None)
        if self._requests.pop(request, None) is None:
            self.bridge.release_lookup(request)
        else:
            self.bridge.finish_request(request)

    def _set_block_ids(self, request: str, blocks: list[int], computed: int) -> None:
        tracked = self._requests.get(request)
        if tracked is not None:
            tracked.blocks = list(blocks)
            tracked.saved_blocks = max(tracked.saved_blocks, computed // self._block_size)

    def _schedule_saves(
        self, metadata: KvmeshConnectorMetadata, request: str, computed: int, output: Any
    ) -> None:
        """Plan the saves of the blocks that are full after the step."""
        tracked = self._requests.get(request)
        if tracked is None:
            return
        after = computed + output.num_scheduled_tokens[request]
        metadata.prefill_tokens += max(0, min(after, tracked.request.num_prompt_tokens) - computed)
        known = len(tracked.request.all_token_ids)
        full_blocks, first = min(after, known) // self._block_size, tracked.saved_blocks
        if full_blocks <= first:
            return
        tracked.saved_blocks = full_blocks
        tokens = list(tracked.request.all_token_ids[: full_blocks * self._block_size])
        blocks = tracked.blocks[first:full_blocks]
        metadata.saves.append(BlockSave(request, tracked.origin, tokens, first, blocks))


def _layout(weights: str, config: Any) -> KvLayout:
    """KV layout of a model with full attention in all layers; raises ValueError for others."""
    group, *others = config.kv_cache_groups
    spec = group.kv_cache_spec
    if others or type(spec).__name__ != "FullAttentionSpec":
        raise ValueError("vllm.kvbm needs a model with full attention in all layers")
    layer = LayerLayout(spec.num_kv_heads, spec.head_size, spec.head_size_v)
    return KvLayout(
        weights=weights,
        dtype=str(spec.dtype).removeprefix("torch."),
        item_bytes=spec.dtype.itemsize,
        block_size=spec.block_size,
        layers=[layer] * len(group.layer_names),
    )


def _origin(request: Any) -> RequestOrigin | None:
    try:
        return request_origin(request)
    except OriginError as error:
        log.warning("request %s uses no lower tiers: %s", request.request_id, error)
        return None
