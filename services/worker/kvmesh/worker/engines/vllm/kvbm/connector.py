"""vLLM's KV connector to the kvbm of the node.

The scheduler polls `get_num_new_matched_tokens` until the lookup of a prompt is complete. Each
worker copies its parts of the blocks found while other requests run; after each step it copies
newly filled blocks aside, and they are written through from the copies. On a GPU the copies run on
streams of their own (docs/adr/0034). Requests from outside the mesh bypass the connector.
"""

from math import ceil
from typing import Any

import msgspec
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvmesh.worker.adapters.copies.block_copies import BlockCopies, row_bytes
from kvmesh.worker.adapters.copies.cuda_copies import CudaBlockCopies
from kvmesh.worker.adapters.copies.host_copies import HostBlockCopies
from kvmesh.worker.adapters.request_origin import KEY
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions
from kvmesh.worker.engines.vllm.kvbm.identity import engine_identity
from kvmesh.worker.engines.vllm.kvbm.lookups import SchedulerBridge
from kvmesh.worker.engines.vllm.kvbm.parts import kv_parts
from kvmesh.worker.engines.vllm.kvbm.scheduler_side import KvmeshConnectorMetadata, SchedulerSide
from kvmesh.worker.engines.vllm.kvbm.settings import CONNECTOR, server_options
from kvmesh.worker.engines.vllm.kvbm.staging import RowStaging, staging_rows
from kvmesh.worker.engines.vllm.kvbm.stats import COMPUTE, COPY, KvmeshConnectorStats
from kvmesh.worker.engines.vllm.kvbm.worker_side import WorkerSide, grouped_caches
from kvmesh.worker.engines.vllm.kvbm.writer import WorkerBridge
from kvmesh.worker.engines.vllm.prometheus import KvbmStats, UnexportedStats

LANE_BYTES = 64 << 20


class KvmeshConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types
    """Created once by the scheduler and once by each worker; each uses its half of the methods."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        if parallel.world_size != ranks or parallel.decode_context_parallel_size > 1:
            raise ValueError("vllm.kvbm supports tensor, but no pipeline or context parallelism")
        self._options = _given_options(vllm_config) or server_options(vllm_config)
        identity = engine_identity(vllm_config)
        self._parts = kv_parts(kv_cache_config, ranks, self._options.weights, identity)
        self._blocks = kv_cache_config.num_blocks
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                SchedulerBridge(self._options, self._parts), self._parts
            )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False  # its copies have addresses of the KV memory, which sleep takes away

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not saved can be computed again

    # scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_blocks(
            request, num_computed_tokens // self._parts.block_size
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_side.update_state_after_alloc(
            request, blocks, num_external_tokens // self._parts.block_size
        )

    def build_connector_meta(self, scheduler_output: Any) -> KvmeshConnectorMetadata:
        return self._scheduler_side.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        stats = connector_output.kv_connector_stats
        data = {} if stats is None else stats.data
        ours = data.get(CONNECTOR)  # of several connectors, by class name
        data = data if ours is None else ours.data
        side = self._scheduler_side
        if COMPUTE in data:
            side.bridge.update_speeds(data[COMPUTE], data[COPY])
        side.end_loads(connector_output.finished_recving or set(), connector_output.failed_recving)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_side.request_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # both sides

    def get_kv_connector_stats(self) -> KvmeshConnectorStats | None:
        side = self._scheduler or self._worker
        return side.take_stats() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvmeshConnectorStats:
        return KvmeshConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, config: Any, *arguments: Any) -> UnexportedStats | KvbmStats:
        kind = UnexportedStats if _given_options(config) else KvbmStats
        return kind(config, *arguments)

    # worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        caches = grouped_caches(kv_caches, self._parts, self._blocks)
        rank, device = get_tensor_model_parallel_rank(), caches[0][0].device
        sizes = [group.layout.block_bytes for group in self._parts.groups]
        on_gpu = device.type == "cuda"
        step, rows = ceil(self._step_tokens / self._parts.block_size), 0
        if self._parts.writes(rank):
            rows = staging_rows(self._options.queue, step, sum(sizes))
        staging = [
            RowStaging(rows, size, row_bytes(group), page_locked=on_gpu)
            for size, group in zip(sizes, caches, strict=True)
        ]
        copies: BlockCopies = HostBlockCopies(device)
        if on_gpu:
            copies = CudaBlockCopies(device, max(LANE_BYTES, *sizes))
        bridge = WorkerBridge(self._options, self._parts, rank, device)
        self._worker = WorkerSide(bridge, self._parts, rank, caches, copies, staging)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker_side.begin_step(self._metadata.finished)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata.loads:
            self._worker_side.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self._worker_side.save(self._metadata.saves, self._metadata.prefill_tokens)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._worker_side.take_loaded()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        self._scheduler = self._worker = None
        if side is not None:
            side.bridge.close()

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("not created with the scheduler role")
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._worker

    @property
    def _metadata(self) -> KvmeshConnectorMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, KvmeshConnectorMetadata):
            raise TypeError(f"unexpected connector metadata {type(metadata).__name__}")
        return metadata


def _given_options(config: Any) -> BridgeOptions | None:
    """The options from the worker that embeds this vLLM; None in a server."""
    given = config.kv_transfer_config.kv_connector_extra_config.get(KEY)
    return msgspec.convert(given, BridgeOptions) if given else None
