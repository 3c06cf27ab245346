"""vLLM's KV connector to the block manager of the node.

Its scheduler asks for each prompt, and asks again until the answer is there. What was found is
copied by the model runner while other requests go on; what a step has filled is copied aside after
it, and written through from there. The engine has one rank, neither tensor nor pipeline parallel.
Requests that do not come over the mesh are left alone.
"""

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

from kvmesh.blocks.layout import KvLayout, LayerLayout
from kvmesh.worker.engines.vllm.block_sharing import KEY
from kvmesh.worker.engines.vllm.bridge import (
    BridgeOptions,
    RequestOrigin,
    SchedulerBridge,
    WorkerBridge,
)
from kvmesh.worker.engines.vllm.connector_stats import (
    COMPUTE,
    COPY,
    CORRUPT,
    LOADED,
    KvmeshConnectorStats,
    StepMeter,
)


class BlockLoad(Struct):
    """Blocks of vLLM to fill from these offsets of an arena."""

    request: str
    arena: str
    offsets: list[int]
    blocks: list[int]


class BlockSave(Struct):
    """Blocks of vLLM that hold blocks `first` … of a prompt after this step.

    `tokens` are those of all blocks up to the last.
    """

    request: str
    origin: RequestOrigin
    tokens: list[int]
    first: int
    blocks: list[int]


class KvmeshConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What the model runner does around one step, in which it computes `prefill` prompt tokens."""

    def __init__(self) -> None:
        self.prefill = 0
        self.loads: list[BlockLoad] = []
        self.saves: list[BlockSave] = []


class TrackedRequest:
    """A request in vLLM: its blocks, `saved` of which have been dealt with."""

    def __init__(self, request: Any, origin: RequestOrigin) -> None:
        self.request = request
        self.origin = origin
        self.blocks: list[int] = []
        self.saved = 0


class KvmeshConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types here
    """Made by the scheduler and by the model runner, each of which uses its own half of it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("vllm.kvbm needs an engine without tensor and pipeline parallelism")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = msgspec.convert(extra[KEY], BridgeOptions)
        self._layout = _layout(self._options.weights, kv_cache_config)
        self._size = self._layout.block_size
        self._scheduler: _SchedulerSide | None = None
        self._writes: WorkerBridge | None = None
        self._layers: list[Tensor] = []
        self._failed: set[int] = set()
        self._received: set[str] = set()
        self._meter = StepMeter()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(
                SchedulerBridge(self._options, self._layout), self._size
            )

    # the scheduler's half

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._planner.match(request, num_computed_tokens // self._size)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks, num_external_tokens // self._size)

    def build_connector_meta(self, scheduler_output: Any) -> KvmeshConnectorMetadata:
        return self._planner.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        stats = connector_output.kv_connector_stats
        if stats is not None:
            self._planner.lookups.measured(stats.data[COMPUTE], stats.data[COPY])
        for request in connector_output.finished_recving or ():
            self._planner.lookups.finish(request)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    # either half

    def get_kv_connector_stats(self) -> KvmeshConnectorStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self._meter.take(*self._writes.counts) if self._writes is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvmeshConnectorStats:
        return KvmeshConnectorStats(data or {})

    # the model runner's half

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._layers = list(kv_caches.values())
        held = sum(cache[0].numel() * cache.element_size() for cache in self._layers)
        if held != self._layout.block_bytes:
            raise ValueError(f"a block has {held} bytes, not {self._layout.block_bytes}")
        self._writes = WorkerBridge(self._options, self._layout, self._layers[0].device)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._meter.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for step in self._plan.loads:
            host = self._writer.arena(step.arena)
            if host is None:
                self._failed.update(step.blocks)
            else:
                self._load(step.blocks, host, step.offsets)
            self._received.add(step.request)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        saved = False
        for step in self._plan.saves:
            if not self._writer.room(len(step.blocks)):
                self._writer.skip(len(step.blocks))
                continue
            rows = self._save(step.blocks)
            saved = True
            self._writer.write(step.request, step.origin, step.tokens, step.first, rows)
        if saved:  # and so the device has done what it was told before
            self._meter.computed(self._plan.prefill)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.lookups.close()
            self._scheduler = None
        if self._writes is not None:
            self._writes.close()
            self._writes = None

    @property
    def _planner(self) -> "_SchedulerSide":
        if self._scheduler is None:
            raise RuntimeError("this is not the scheduler's connector")
        return self._scheduler

    @property
    def _writer(self) -> WorkerBridge:
        if self._writes is None:
            raise RuntimeError("no KV caches have been registered")
        return self._writes

    @property
    def _plan(self) -> KvmeshConnectorMetadata:
        plan = self._get_connector_metadata()
        if not isinstance(plan, KvmeshConnectorMetadata):
            raise TypeError(f"the plan of a step is a {type(plan).__name__}")
        return plan

    def _load(self, blocks: list[int], host: Tensor, offsets: list[int]) -> None:
        began = time.perf_counter()
        index, start = torch.tensor(blocks, device=self._layers[0].device), 0
        for cache in self._layers:
            size = cache[0].numel() * cache.element_size()
            parts = [host[at + start : at + start + size] for at in offsets]
            values = torch.stack(parts).view(cache.dtype).view(len(blocks), *cache.shape[1:])
            cache[index] = values.to(cache.device)
            start += size
        self._meter.copied(start * len(blocks), time.perf_counter() - began)

    def _save(self, blocks: list[int]) -> Tensor:
        """The content of blocks, one row each."""
        index = torch.tensor(blocks, device=self._layers[0].device)
        parts = [cache[index].flatten(1).view(torch.uint8) for cache in self._layers]
        return torch.cat(parts, 1).cpu()


class _SchedulerSide:
    """What vLLM's scheduler knows of its requests, and what its model runner is to do."""

    def __init__(self, lookups: SchedulerBridge, block_size: int) -> None:
        self.lookups = lookups
        self._size = block_size
        self._tracks: dict[str, TrackedRequest] = {}
        self._held: dict[str, int] = {}
        self._loaded: dict[str, list[int]] = {}
        self._corrupt = 0
        self._loads: list[BlockLoad] = []

    def match(self, request: Any, held: int) -> tuple[int | None, bool]:
        origin, reusable = _origin(request), (request.num_tokens - 1) // self._size
        if origin is None or reusable <= held:
            return 0, False
        tokens = request.all_token_ids[: reusable * self._size]
        found = self.lookups.find(request.request_id, origin, tokens, held)
        if found is None:
            return None, False
        self._held[request.request_id] = held
        return found * self._size, found > 0

    def allocated(self, request: Any, blocks: Any, count: int) -> None:
        name, origin = request.request_id, _origin(request)
        if origin is None:
            return
        self._tracks.setdefault(name, TrackedRequest(request, origin))
        held, found = self._held.pop(name, 0), self.lookups.take(name)
        places = blocks.get_block_ids()[0][held : held + count]
        if count and found is None:  # given back meanwhile: vLLM hears that it cannot be loaded
            self._loads.append(BlockLoad(name, "", [], places))
        elif count and found is not None:
            offsets, tiers = found.after(held)
            self._loads.append(BlockLoad(name, found.arena, offsets[:count].tolist(), places))
            blocks_of = Counter(tiers[:count])
            deepest = max(blocks_of)
            self._loaded[origin.request] = [blocks_of[n] for n in range(1, deepest + 1)]
        else:
            self.lookups.finish(name)

    def plan(self, output: Any) -> KvmeshConnectorMetadata:
        plan, cached = KvmeshConnectorMetadata(), output.scheduled_cached_reqs
        plan.loads, self._loads = self._loads, []
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids[0], new.num_computed_tokens)
            self._go_on(plan, new.req_id, new.num_computed_tokens, output)
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request, blocks, computed in rows:
            fresh = blocks[0] if blocks is not None else []
            if request in cached.resumed_req_ids:
                self._begin(request, fresh, computed)
            elif request in self._tracks:
                self._tracks[request].blocks += fresh
            self._go_on(plan, request, computed, output)
        return plan

    def take_stats(self) -> KvmeshConnectorStats | None:
        """Which requests load what from where, and blocks that were not what they should be."""
        loaded, corrupt = self._loaded, self.lookups.corrupt
        if not loaded and corrupt == self._corrupt:
            return None
        self._loaded, self._corrupt = {}, corrupt
        return KvmeshConnectorStats({LOADED: loaded, CORRUPT: corrupt})

    def finished(self, request: str) -> None:
        self._held.pop(request, None)
        if self._tracks.pop(request, None) is None:
            self.lookups.finish(request)
        else:
            self.lookups.end(request)

    def _begin(self, request: str, blocks: list[int], computed: int) -> None:
        track = self._tracks.get(request)
        if track is not None:
            track.blocks = list(blocks)
            track.saved = max(track.saved, computed // self._size)

    def _go_on(
        self, plan: KvmeshConnectorMetadata, request: str, computed: int, output: Any
    ) -> None:
        """Note what is full after the step."""
        track = self._tracks.get(request)
        if track is None:
            return
        after = computed + output.num_scheduled_tokens[request]
        plan.prefill += max(0, min(after, track.request.num_prompt_tokens) - computed)
        known = len(track.request.all_token_ids)
        full, first = min(after, known) // self._size, track.saved
        if full <= first:
            return
        track.saved = full
        tokens = list(track.request.all_token_ids[: full * self._size])
        blocks = track.blocks[first:full]
        plan.saves.append(BlockSave(request, track.origin, tokens, first, blocks))


def _origin(request: Any) -> RequestOrigin | None:
    told = (request.kv_transfer_params or {}).get(KEY)
    return msgspec.convert(told, RequestOrigin) if told is not None else None


def _layout(weights: str, config: Any) -> KvLayout:
    """Of a model whose layers all cache keys and values of all tokens."""
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
