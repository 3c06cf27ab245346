"""The torch engine: scheduling on the event loop, forward passes in one thread."""

import asyncio
import gc
import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from kvmesh.bus.messages import (
    Capacity,
    Clear,
    Guided,
    KvEvent,
    Load,
    Pin,
    Prefetch,
    StartPhase,
    Work,
)
from kvmesh.transfer import TransferError, Transport
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.prefetching.queue import PrefetchQueue
from kvmesh.worker.capabilities import HandoffCounts, TierCounts, never
from kvmesh.worker.clearing import ClearOutcome, in_use, named_tiers
from kvmesh.worker.engine import (
    EngineConfigError,
    EngineContext,
    EngineError,
    EngineInfo,
    OutputDelta,
    Rejected,
    Sink,
    StoreFactory,
)
from kvmesh.worker.enginecore.block_manager import ENGINE
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.enginecore.rank_load import rank_load
from kvmesh.worker.enginecore.retention import RetentionManager
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.engine_tiers import tier_limits
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.worker.engines.torch.blocks.lower_tiers import LowerTiers
from kvmesh.worker.engines.torch.constraints.guided import GrammarCache
from kvmesh.worker.engines.torch.core import TorchCore
from kvmesh.worker.engines.torch.handoff import Handoffs, staging_memory
from kvmesh.worker.engines.torch.model.loading import load_model
from kvmesh.worker.engines.torch.model.node_weights import TorchWeights
from kvmesh.worker.engines.torch.model.paged_model import PagedModel
from kvmesh.worker.engines.torch.model.preparation import prepare_model
from kvmesh.worker.engines.torch.model.sampling import Sampler
from kvmesh.worker.engines.torch.prefetch import TorchPrefetcher
from kvmesh.worker.model_folder import model_context

log = logging.getLogger(__name__)
CLOSE_S = 10.0
POLL_S = 0.05
RANK = 0


class TorchEngine:
    """The model in the folder, with `[worker]` and `[torch]`: one rank in this process."""

    def __init__(self, context: EngineContext) -> None:
        settings = context.settings
        self._timeline = context.timeline
        self._options = settings.torch
        self._worker = settings.worker
        self._transfer = settings.transfer
        self._folder = context.folder
        self._store = context.store
        self._access = context.weights
        self._weights: TorchWeights | None = None
        self._lower_tiers: LowerTiers | None = None
        self._handoffs: Handoffs | None = None
        self._loader: TorchPrefetcher | None = None
        self._prefetches: PrefetchQueue | None = None
        self._thread = ThreadPoolExecutor(1, "torch")
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._loaded: tuple[TorchCore, GrammarCache] | None = None
        self._sink: Sink | None = None

    async def park(self) -> None:
        self._check()
        loop = asyncio.get_running_loop()
        with self._timeline.phase(StartPhase.CONFIGURATION):
            await loop.run_in_executor(self._thread, prepare_model, self._folder)

    async def lost(self) -> EngineError:
        return await never()

    def _check(self) -> None:
        if self._worker.adapters:
            raise EngineConfigError("the torch engine serves no adapters")

    async def start(self, sink: Sink) -> EngineInfo:
        self._check()
        loop = asyncio.get_running_loop()
        self._loaded = await loop.run_in_executor(self._thread, self._load)
        self._sink = sink
        core = self._core
        if self._store is not None:
            await self._open_lower_tiers(core, self._store)
        await self.switch_role(self._worker.serves)
        self._loader = TorchPrefetcher(
            core, self._lower_tiers, self._accept, self._on_blocks_changed
        )
        self._prefetches = PrefetchQueue(self._loader, core.limits.block_size)
        self._task = asyncio.create_task(self._run(core, sink), name="torch engine")
        return EngineInfo(
            reports_outcomes=True,
            name="torch",
            version=torch.__version__,
            context=core.context,
            block_size=core.limits.block_size,
            structural_tags=True,
            supports_handoff=True,
            tiered=self._store is not None,
            kv_layout=core.model.layout.summary,
            capacity=Capacity(
                blocks=core.blocks.capacity,
                max_sequences=core.limits.max_sequences,
                max_batched_tokens=core.limits.max_batched_tokens,
            ),
        )

    async def switch_role(self, serves: str) -> None:
        if serves != "aggregated" and self._handoffs is None:
            self._handoffs = await self._open_handoffs(self._core)

    def submit(self, work: Work) -> None:
        self._accept(work)
        if self._prefetches is not None:
            self._prefetches.on_request(work)

    def _accept(self, work: Work) -> None:
        if self._loaded is None:
            raise Rejected("the engine has not started")
        core, grammars = self._loaded
        if work.rank != RANK:
            raise Rejected(f"there is no rank {work.rank}")
        tokens = memoryview(work.tokens).cast("I")
        if not tokens:
            raise Rejected("the prompt is empty")
        highest = max([max(tokens), *work.sampling.logit_bias])
        if highest >= core.model.vocabulary:
            raise Rejected(f"token {highest} is not in the model's vocabulary")
        try:
            self._submit_to_core(core, work, _sampler(work, core.model, grammars))
        except ValueError as error:
            raise Rejected(str(error)) from error
        self._idle.clear()
        self._wake.set()

    def compiled(self, guided: Guided) -> bool:
        return self._loaded is not None and guided in self._loaded[1]

    async def compile(self, guided: Guided) -> None:
        if self._loaded is None:
            raise Rejected("the engine has not started")
        await self._loaded[1].compile(guided)

    def _submit_to_core(self, core: TorchCore, work: Work, sampler: Sampler) -> None:
        """Submit the work to the core, after fetching KV offered for it."""
        if self._handoffs is None or not (work.handoff or work.prefill):
            core.submit(work, sampler)
        elif work.prefill:
            core.submit(work, sampler)
            self._handoffs.expect_prefill(work)
        else:
            core.max_output(work)
            self._handoffs.fetch(work, partial(core.submit, work, sampler))

    def prefetch(self, command: Prefetch) -> str:
        if self._prefetches is None:
            return "the engine has not started"
        if command.rank != RANK:
            return f"there is no rank {command.rank}"
        return self._prefetches.start(command)

    def tier_counts(self) -> TierCounts | None:
        return self._lower_tiers.counts if self._lower_tiers is not None else None

    def handoff_counts(self) -> HandoffCounts | None:
        return self._handoffs.counts if self._handoffs is not None else None

    def abort(self, request: str) -> bool:
        if self._prefetches is not None and self._prefetches.cancel(request):
            return True
        transferring = self._handoffs is not None and self._handoffs.abort(request)
        if self._sink is None or not (self._core.abort(request) or transferring):
            return False
        self._sink.output([OutputDelta(request, [], finish="abort")])
        if self._lower_tiers is not None:
            self._lower_tiers.writer.end(request)
        self._wake.set()
        return True

    def load(self, instance: str) -> list[Load]:
        core, ratio = self._core, self._lower_tiers.load_ratio if self._lower_tiers else 0.0
        transferring = self._transferring
        return [rank_load(instance, RANK, core.scheduler, core.counters, ratio, transferring)]

    def dump(self, rank: int) -> None:
        if rank == RANK:
            self._publish(self._core.take_events())
            self._publish(self._core.blocks.dump())

    async def clear(self, command: Clear) -> ClearOutcome:
        if ENGINE not in named_tiers(command):
            return ClearOutcome()
        salt, tenant = command.salt, command.tenant
        blocks = self._change_retention(lambda manager, _: manager.clear(salt, tenant))
        return ClearOutcome(blocks, in_use(self._core.blocks.retention.held(salt, tenant)))

    # retention

    async def release(self, sessions: list[str]) -> int:
        return self._change_retention(lambda manager, _: manager.release(sessions))

    async def pin(self, pin: Pin) -> int:
        return self._change_retention(lambda manager, now: manager.pin(pin, now))

    async def unpin(self, pin: str) -> int:
        return self._change_retention(lambda manager, now: manager.unpin(pin, now))

    def retention(self) -> list[RetentionState]:
        return [self._core.blocks.retention.state(RANK, asyncio.get_running_loop().time())]

    async def drain(self) -> None:
        await self._idle.wait()
        if self._handoffs is not None:
            await self._handoffs.drain()

    async def hand_down(self, timeout_s: float) -> int:
        return await self._lower_tiers.hand_down(timeout_s) if self._lower_tiers else 0

    def cannot_sleep(self) -> str:
        return ""

    async def sleep(self) -> None:
        self._sink = None
        await self._stop()
        self._task = self._loader = self._prefetches = self._handoffs = self._lower_tiers = None
        self._loaded = None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, _free_memory)
        self._close_weights()

    async def close(self) -> None:
        await self._stop()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._thread.shutdown), CLOSE_S)
        except TimeoutError:
            log.warning("the current step did not end within %g s", CLOSE_S)
        self._close_weights()

    async def _stop(self) -> None:
        """Stop everything but the thread."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._prefetches is not None:
            await self._prefetches.close()
        if self._handoffs is not None:
            await self._handoffs.close()
        if self._lower_tiers is not None:
            await self._lower_tiers.close()
        if self._loaded is not None:
            self._loaded[1].close()

    def _close_weights(self) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()

    # steps

    async def _run(self, core: TorchCore, sink: Sink) -> None:
        try:
            while True:
                self._wake.clear()
                if not core.busy:
                    if not self._transferring:
                        self._idle.set()
                    await self._wake.wait()
                progressed = await self._step(core, sink)
                if not progressed and core.busy:
                    await self._wait_for_change()
        except Exception as error:
            log.debug("step failed", exc_info=error)
            sink.failed(EngineError(f"the torch engine died: {type(error).__name__}: {error}"))

    async def _wait_for_change(self) -> None:
        """Wait up to POLL_S for loaded or freed blocks."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _step(self, core: TorchCore, sink: Sink) -> bool:
        """Run a step; False if there is no work."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        step, events = core.plan(start)
        self._publish(events)
        if self._lower_tiers is not None:
            self._lower_tiers.poll()
        if not step.entries:
            return False
        await loop.run_in_executor(self._thread, core.run, step)
        seconds = loop.time() - start
        deltas, events = core.commit(step, seconds)
        self._publish(events)
        ready = self._loader.hidden.visible(deltas) if self._loader is not None else deltas
        if self._handoffs is not None:
            ready = self._handoffs.intercept(ready, sink.output)
        if ready:
            sink.output(ready)
        if self._lower_tiers is not None:
            self._lower_tiers.on_step(step, deltas, seconds)
        return True

    async def _open_lower_tiers(self, core: TorchCore, store: StoreFactory) -> None:
        arenas = ArenaTensors(core.model.device)
        client = store(core.model.layout, arenas)
        self._lower_tiers = core.lower_tiers = LowerTiers(
            core, client, arenas, tier_limits(self._worker), self._on_blocks_changed
        )
        await self._lower_tiers.open()

    async def _open_handoffs(self, core: TorchCore) -> Handoffs:
        try:
            transport = await Transport.open(self._transfer)
        except TransferError as error:
            raise EngineError(f"cannot open the KV transfer: {error}") from error
        try:
            # page-locking a gigabyte takes long enough to delay requests in progress
            host = await asyncio.to_thread(staging_memory, core.model, self._transfer)
        except BaseException:
            await transport.close()
            raise
        return Handoffs(core, transport, host, self._transfer, self._on_blocks_changed)

    @property
    def _transferring(self) -> int:
        return self._handoffs.in_progress if self._handoffs is not None else 0

    def _change_retention(self, change: Callable[[RetentionManager, float], int]) -> int:
        """Apply a change of retention and publish the evictions that it causes."""
        blocks = change(self._core.blocks.retention, asyncio.get_running_loop().time())
        self._publish(self._core.take_events())
        return blocks

    def _on_blocks_changed(self) -> None:
        self._publish(self._core.take_events())
        self._wake.set()

    def _publish(self, events: list[KvEvent]) -> None:
        if events and self._sink is not None:
            self._sink.events(RANK, events)

    @property
    def _core(self) -> TorchCore:
        if self._loaded is None:
            raise RuntimeError("the engine has not started")
        return self._loaded[0]

    def _load(self) -> tuple[TorchCore, GrammarCache]:
        options, block_size = self._options, self._worker.block_size
        torch.set_num_threads(options.threads or _default_threads())
        if self._access is not None:
            self._weights = TorchWeights(self._access, self._folder)
        with self._timeline.phase(StartPhase.WEIGHTS):
            loaded = load_model(self._folder, options.dtype, options.device, self._weights)
        with self._timeline.phase(StartPhase.WARM_UP):
            model = PagedModel(loaded, block_size, options.pass_tokens)
        blocks = options.blocks or options.kv_bytes // model.layout.block_bytes
        if not blocks:
            size = model.layout.block_bytes
            raise EngineConfigError(f"kv_bytes {options.kv_bytes} holds no block of {size} bytes")
        with self._timeline.phase(StartPhase.KV_ALLOCATION):
            model.allocate(blocks)
        timeout_s = self._worker.compile_timeout_s
        grammars = GrammarCache(self._folder, model.vocabulary, model.stop_tokens, timeout_s)
        with self._timeline.phase(StartPhase.CONFIGURATION):
            grammars.load()
        limits = SchedulerLimits(
            block_size=block_size,
            max_sequences=options.max_sequences,
            max_batched_tokens=options.max_batched_tokens,
            watermark=options.watermark,
        )
        context = self._worker.context or model_context(self._folder)
        retention = retention_options(self._worker)
        core = TorchCore(model, limits, blocks, min(context, blocks * block_size), retention)
        return core, grammars


def _sampler(work: Work, model: PagedModel, grammars: GrammarCache) -> Sampler:
    """The sampler of a request; raises Rejected if its constraint cannot be compiled."""
    sampling = work.sampling
    tokens = memoryview(work.tokens).cast("I").tolist()
    base = len(tokens) - work.generated
    constraint = grammars.constraint(sampling.guided) if sampling.guided is not None else None
    seed = secrets.randbits(64)
    return Sampler(sampling, tokens[:base], tokens[base:], model.stop_tokens, seed, constraint)


def _free_memory() -> None:
    """Return the memory of a model that nothing refers to any more: cycles hold it otherwise."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _default_threads() -> int:
    """Half of the cores, rounded down to a power of two so that work splits alike at any size."""
    half = max(1, (os.cpu_count() or 1) // 2)
    return 1 << (half.bit_length() - 1)
