"""KV connector for vLLM that retains blocks of its prefix cache; it transfers nothing.

vLLM's scheduler hands its block pool to a connector. This one replaces the pool's free queue, and
claims the blocks of each request when the scheduler has allocated them. Commands arrive through
`EngineCore.kvmesh_retention`, which vLLM calls between two steps.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.engine.core import EngineCore

from kvmesh.bus.messages import Clear, MessageDecoder, Pin, Release, Unpin
from kvmesh.retention.budget import RetentionBudget
from kvmesh.worker.adapters.connector_stores import clear_stores
from kvmesh.worker.adapters.request_origin import KEY, OriginError, request_origin
from kvmesh.worker.clearing import ENGINE, in_use, named_tiers
from kvmesh.worker.engines.vllm.connectors.queries import count_no_queries
from kvmesh.worker.engines.vllm.prometheus import UnexportedStats
from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns
from kvmesh.worker.engines.vllm.retention.checkpoints import RetainedPrefixes, retained_prefixes
from kvmesh.worker.engines.vllm.retention.hinted_requests import HintedRequests
from kvmesh.worker.engines.vllm.retention.internals import changed_internals, no_retention
from kvmesh.worker.engines.vllm.retention.prefix_cache import PrefixCacheRetention
from kvmesh.worker.engines.vllm.retention.removal_causes import RemovalCauses
from kvmesh.worker.engines.vllm.retention.requests import RetainedRequest
from kvmesh.worker.engines.vllm.retention.settings import (
    CONNECTOR,
    DECODE,
    KEPT,
    LOADED,
    OUTCOMES,
    PREFILL_STEPS,
    PROMPT,
    STATE,
    ConnectorOptions,
    QueryOutcomes,
    QueryState,
)
from kvmesh.worker.engines.vllm.retention.vllm_prefix_cache import VllmPrefixCache

log = logging.getLogger(__name__)
NOT_TRACKED = None, None
NO_TRANSFER = KVConnectorMetadata()
REPORT_S = 1.0  # between looks for claims that have expired
_commands = MessageDecoder(Clear | Release | Pin | Unpin | QueryState | QueryOutcomes)


class RetentionStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """OUTCOMES has those of each request's directives, STATE the state of retention.

    PREFILL_STEPS has the number of steps so far that computed prompt tokens.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        outcomes = {**self.data.get(OUTCOMES, {}), **other.data.get(OUTCOMES, {})}
        self.data.update(other.data)
        self.data[OUTCOMES] = outcomes
        return self

    def reduce(self) -> dict[str, int | float]:
        """Figures for vLLM's own log."""
        state = self.data.get(STATE, {})
        return {name: value for name, value in state.items() if isinstance(value, int)}

    def is_empty(self) -> bool:
        return not self.data


class KvmeshRetentionConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Created by the scheduler and by each worker process; only the scheduler's does anything."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._options = msgspec.convert(extra.get(KEY, {}), ConnectorOptions)
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._requests: dict[str, tuple[Any, RetainedRequest | None]] = {}
        self._prompts: set[str] = set()  # of requests whose prompts are not complete
        self._hinted = HintedRequests()
        self._missing = "vLLM has not bound its block pool"
        self._ended: list[str] = []
        self._outcomes: dict[str, list[str]] = {}
        self._retention: PrefixCacheRetention | None = None
        self._prefixes: RetainedPrefixes | None = None
        self._pool: Any = None
        self._causes: RemovalCauses | None = None
        self._figures: tuple[int, ...] = ()
        self._prefill_steps = 0
        self._reported_steps = 0
        self._changed = False
        self._report_at = 0.0
        if role is KVConnectorRole.SCHEDULER:
            _install_command(self)
            count_no_queries(CONNECTOR)

    # scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        options, pool = self._options.retention, gpu_block_pool
        changed = changed_internals()
        if changed:
            self._missing = no_retention(changed)
            log.error("%s", self._missing)
            return
        budget = RetentionBudget(
            int(options.budget * pool.num_gpu_blocks), unlimited_ttl_s=options.session_idle_s
        )
        runs = RetainedRuns(pool.blocks, budget)
        self._pool = pool
        cache = VllmPrefixCache(pool, runs, time.monotonic)
        self._causes = cache.causes
        self._retention = PrefixCacheRetention(
            options,
            cache,
            runs,
            budget,
            [spec.block_size for spec in self._specs],
            pool.hash_block_size,
        )
        self._prefixes = retained_prefixes(
            self._vllm_config, self._specs, self._retention, self._hinted
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._prefixes is not None:
            end = self._prefixes.end(request, time.monotonic())
            if end > num_computed_tokens:
                request.shared_prefix_boundary = end
        self._note_allocation(request)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._note_allocation(None)
        self._forget_prefix(request.request_id)
        if request.request_id not in self._requests:
            started = self._start(request)
            self._requests[request.request_id] = request, started
            if started is not None:
                self._prompts.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        retention = self._retention
        self._note_allocation(None)
        if retention is not None:
            if self._ended:
                retention.release(self._ended)
                self._ended.clear()
            self._count_step(scheduler_output)
            self._claim_allocated(retention, scheduler_output)
        return NO_TRANSFER

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        name, outcome = request.request_id, None
        self._forget_prefix(name)
        _, tracked = self._requests.pop(name, NOT_TRACKED)
        if tracked is not None and self._retention is not None:
            now = time.monotonic()
            self._claim(self._retention, tracked, request.num_computed_tokens)
            self._retention.claim_copies(tracked, now)
            self._retention.rank_prompt(tracked, now)
            if name not in self._prompts and tracked.output_directives:
                outcome = self._retention.grant(tracked.output_directives)[0]
            hint = self._hinted.hint(name)
            if hint is not None and hint.final and tracked.session is not None:
                self._ended.append(tracked.session)
        self._prompts.discard(name)
        self._changed = True
        report = self._hinted.finish(name, outcome)
        if report is not None:
            return False, {KEY: report}
        if outcome is None:
            return False, None
        if tracked is not None:
            self._hinted.record(tracked.id, {DECODE: outcome})
        return False, {KEY: {DECODE: outcome}}

    def note_loaded(self, request: str, tokens: list[int]) -> None:
        """Report the tokens that another connector loads for a request, from tier 1 on."""
        self._hinted.record(request, {LOADED: tokens})

    def get_kv_connector_stats(self) -> RetentionStats | None:
        now = time.monotonic()
        if self._retention is None or not (self._changed or now >= self._report_at):
            return None
        self._changed, self._report_at = False, now + REPORT_S
        data: dict[str, Any] = {}
        if self._outcomes:
            data[OUTCOMES], self._outcomes = self._outcomes, {}
        if self._prefill_steps > self._reported_steps:
            data[PREFILL_STEPS] = self._reported_steps = self._prefill_steps
        figures = self._retention.figures(now)
        if figures != self._figures:
            self._figures, data[STATE] = figures, self._current_state(self._retention)
        return RetentionStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RetentionStats:
        return RetentionStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> UnexportedStats:
        return UnexportedStats(*arguments)

    def execute(self, packed: bytes) -> dict[str, Any]:
        """Execute a command of the worker; returns its number of blocks and the new state."""
        retention, now = self._retention, time.monotonic()
        if retention is None:
            raise RuntimeError(self._missing)
        match _commands.decode(packed):
            case Clear() as clear:
                return self._clear(retention, clear)
            case Release() as release:
                blocks = retention.release(release.sessions)
            case Pin() as pin:
                blocks = retention.pin(pin, now)
            case Unpin(pin_id):
                blocks = retention.unpin(pin_id, now)
            case QueryOutcomes(request):
                return {"report": self._hinted.report(request)}
            case QueryState():
                blocks = self._pool.num_gpu_blocks
        return {"blocks": blocks, STATE: self._current_state(retention)}

    def _clear(self, retention: PrefixCacheRetention, command: Clear) -> dict[str, Any]:
        blocks, kept = 0, dict[int, str]()
        if ENGINE in named_tiers(command):
            blocks = retention.clear(command.salt, command.tenant)
            kept = in_use(retention.held(command.salt, command.tenant))
        return {"blocks": blocks, KEPT: kept, STATE: self._current_state(retention)}

    # worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # helpers

    def _note_allocation(self, request: Any) -> None:
        """Note the waiting request that vLLM allocates blocks for, until its next call."""
        if self._causes is not None:
            self._causes.allocating = request

    def _forget_prefix(self, request: str) -> None:
        if self._prefixes is not None:
            self._prefixes.forget(request)

    def _start(self, request: Any) -> RetainedRequest | None:
        retention = self._retention
        try:
            origin = request_origin(request) or self._hinted.begin(request)
        except OriginError as error:
            log.warning("request %s claims nothing: %s", request.request_id, error)
            return None
        if origin is None:
            return None
        if retention is None:
            self._hinted.refuse(request.request_id, "this vLLM differs from what was tested")
            return None
        if request.mm_features:
            self._hinted.refuse(request.request_id, "the prompt has images")
            return None
        tokens = array("I", request.prompt_token_ids)
        started = RetainedRequest(
            origin,
            request.block_hashes,
            tokens,
            retention.group_sizes,
            retention.hash_size,
            retention.defaults,
        )
        retention.start_request(started, time.monotonic())
        return started

    def _count_step(self, output: Any) -> None:
        """Count a step that computes prompt tokens: a request in it has no output yet."""
        if output.scheduled_new_reqs or 0 in output.scheduled_cached_reqs.num_output_tokens:
            self._prefill_steps += 1
            self._changed = True

    def _claim_allocated(self, retention: PrefixCacheRetention, output: Any) -> None:
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        if not (output.scheduled_new_reqs or self._prompts or any(cached.new_block_ids)):
            return  # as in most steps: a full block is claimed when the next one is allocated
        self._changed = True
        for new in output.scheduled_new_reqs:
            self._add_blocks(retention, new.req_id, new.block_ids, replace=True)
            computed = new.num_computed_tokens + scheduled[new.req_id]
            self._claim_request(retention, new.req_id, computed)
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, blocks, computed in rows:
            if blocks is not None:
                self._add_blocks(retention, name, blocks, name in cached.resumed_req_ids)
            if blocks is not None or name in self._prompts:
                self._claim_request(retention, name, computed + scheduled[name])

    def _add_blocks(
        self,
        retention: PrefixCacheRetention,
        name: str,
        blocks: Sequence[Sequence[int]],
        replace: bool,
    ) -> None:
        tracked = self._requests.get(name, NOT_TRACKED)[1]
        for group, ids in enumerate(blocks):
            if tracked is None:
                retention.allocated(None, ids, 0, "")
                continue
            retention.allocated(tracked, ids, tracked.salt, tracked.tenant)
            if replace:
                tracked.blocks[group], tracked.claimed[group] = list(ids), 0
            else:
                tracked.blocks[group] += ids

    def _claim_request(self, retention: PrefixCacheRetention, name: str, computed: int) -> None:
        request, tracked = self._requests.get(name, NOT_TRACKED)
        if tracked is None:
            return
        self._claim(retention, tracked, computed)
        if name in self._prompts and computed >= request.num_prompt_tokens:
            self._prompts.remove(name)
            retention.rank_prompt(tracked, time.monotonic())
            outcomes = retention.grant(tracked.prompt_directives)
            self._report(retention, name, tracked, outcomes)

    def _report(
        self,
        retention: PrefixCacheRetention,
        name: str,
        tracked: RetainedRequest,
        outcomes: list[str],
    ) -> None:
        """Report the outcomes of a prompt to the mesh or to its caller, and pin it if asked to."""
        hint = self._hinted.hint(name)
        if hint is None:
            if outcomes:
                self._outcomes[tracked.id] = outcomes
                self._hinted.record(tracked.id, {PROMPT: outcomes})
            return
        self._hinted.report_prompt(name, outcomes)
        if hint.pin is not None:
            pin = Pin(
                id=hint.pin.id,
                sequence_hashes=tracked.sequence_hashes.tobytes(),
                ttl_s=hint.pin.ttl_s,
                priority=hint.pin.priority,
                tenant=tracked.tenant,
            )
            self._hinted.report_pin(name, retention.pin(pin, time.monotonic()))

    def _claim(
        self, retention: PrefixCacheRetention, request: RetainedRequest, computed: int
    ) -> None:
        now = time.monotonic()
        for group, size in enumerate(retention.group_sizes):
            end = min(computed // size, len(request.blocks[group]))
            if end > request.claimed[group]:
                retention.claim(request, group, end, now)

    def _current_state(self, retention: PrefixCacheRetention) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(retention.state(0, time.monotonic()))
        return state


def _install_command(connector: KvmeshRetentionConnector) -> None:
    """Add `kvmesh_retention(packed)` to vLLM's engine core in this process."""

    def kvmesh_retention(core: Any, packed: bytes) -> dict[str, Any]:
        try:
            result = connector.execute(packed)
            _publish_events(core.scheduler)
            if KEPT in result:
                result[KEPT] |= _clear_stores(core.scheduler, packed)
        except Exception as error:  # vLLM would log a traceback per call
            log.exception("a retention command failed")
            return {"error": str(error)}
        return result

    command: Callable[[Any, bytes], dict[str, Any]] = kvmesh_retention
    EngineCore.kvmesh_retention = command


def _clear_stores(scheduler: Any, packed: bytes) -> dict[int, str]:
    """Clear the stores of the other connectors; returns why blocks in some tiers are left.

    A store's own event of it (SimpleCPUOffloadConnector's) reads as one of the device memory.
    """
    kept, cleared = clear_stores(scheduler, _commands.decode(packed))
    if cleared:
        events = scheduler.connector.take_events()
        told = [event for event in events if not isinstance(event, AllBlocksCleared)]
        _publish_events(scheduler, [*told, *cleared])
    return kept


def _publish_events(scheduler: Any, more: Sequence[Any] = ()) -> None:
    """Publish the events of a command now: vLLM would wait for its next step."""
    events = [*(scheduler.kv_cache_manager.take_events() or ()), *more]
    if events:
        scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
