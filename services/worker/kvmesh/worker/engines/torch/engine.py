"""The torch engine on the mesh: books on the event loop, arithmetic in a thread of its own."""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from kvmesh.bus.messages import Capacity, Guided, KvEvent, Load, Pin, Prefetch, Work
from kvmesh.settings.schema import Settings
from kvmesh.transfer import TransferError, Transport
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.prefetch import PrefetchQueue
from kvmesh.worker.capabilities import TierCounts
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
from kvmesh.worker.enginecore.retention import RetentionManager
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.worker.engines.torch.blocks.lower_tiers import LowerOptions, LowerTiers
from kvmesh.worker.engines.torch.constraints.guided import Grammars
from kvmesh.worker.engines.torch.core import TorchCore
from kvmesh.worker.engines.torch.handoff import Handoffs
from kvmesh.worker.engines.torch.model.paged_model import PagedModel, load_model
from kvmesh.worker.engines.torch.model.sampling import Sampler
from kvmesh.worker.engines.torch.prefetch import TorchLoader
from kvmesh.worker.model_folder import model_context

log = logging.getLogger(__name__)
CLOSE_S = 10.0
LOOK_S = 0.05
RANK = 0


def create(context: EngineContext) -> "TorchEngine":
    """The engine that `[worker]` and `[torch]` describe, for the model in the folder."""
    settings = context.settings
    return TorchEngine(settings, context.folder, context.store)


class TorchEngine:
    """One model, one rank, in this process.

    `store` makes the way to the tiers below, if there may be any.
    """

    def __init__(self, settings: Settings, folder: Path, store: StoreFactory | None) -> None:
        self._options = settings.torch
        self._worker = settings.worker
        self._transfer = settings.transfer
        self._folder = folder
        self._store = store
        self._lower: LowerTiers | None = None
        self._handoffs: Handoffs | None = None
        self._prefetches: PrefetchQueue | None = None
        self._thread = ThreadPoolExecutor(1, "torch")
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._loaded: tuple[TorchCore, Grammars] | None = None
        self._sink: Sink | None = None

    async def start(self, sink: Sink) -> EngineInfo:
        if self._worker.adapters:
            raise EngineConfigError("the torch engine serves no adapters")
        loop = asyncio.get_running_loop()
        self._loaded = await loop.run_in_executor(self._thread, self._load)
        self._sink = sink
        core = self._core
        if self._store is not None:
            await self._open_lower(core, self._store)
        if self._worker.serves != "aggregated":
            self._handoffs = await self._open_handoffs(core)
        loader = TorchLoader(core, self._lower, self._accept, self._on_moved)
        self._prefetches = PrefetchQueue(loader, core.limits.block_size)
        self._task = asyncio.create_task(self._run(core, sink), name="torch engine")
        return EngineInfo(
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
        if max(tokens) >= core.model.vocabulary:
            raise Rejected(f"token {max(tokens)} is not in the model's vocabulary")
        try:
            self._queue(core, work, _sampler(work, core.model, grammars))
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

    def _queue(self, core: TorchCore, work: Work, sampler: Sampler) -> None:
        """Hand the work to the core, after what has been left for it has come."""
        if self._handoffs is None or not (work.handoff or work.prefill):
            core.submit(work, sampler)
        elif work.prefill:
            core.submit(work, sampler)
            self._handoffs.expect(work)
        else:
            core.limit(work)
            self._handoffs.fetch(work, partial(core.submit, work, sampler))

    def prefetch(self, wish: Prefetch) -> str:
        if self._prefetches is None:
            return "the engine has not started"
        if wish.rank != RANK:
            return f"there is no rank {wish.rank}"
        return self._prefetches.start(wish)

    def tier_counts(self) -> TierCounts | None:
        return self._lower.counts if self._lower is not None else None

    def abort(self, request: str) -> bool:
        if self._prefetches is not None and self._prefetches.cancel(request):
            return True
        moved = self._handoffs is not None and self._handoffs.abort(request)
        if self._sink is None or not (self._core.abort(request) or moved):
            return False
        self._sink.output([OutputDelta(request, [], finish="abort")])
        if self._lower is not None:
            self._lower.writer.end(request)
        self._wake.set()
        return True

    def load(self, instance: str) -> list[Load]:
        core, counters = self._core, self._core.counters
        return [
            Load(
                instance=instance,
                rank=RANK,
                running=core.scheduler.running,
                waiting=core.scheduler.waiting_count + self._moving,
                active_blocks=core.blocks.active,
                cached_blocks=core.blocks.cached,
                total_blocks=core.blocks.capacity,
                prefill_tokens=core.scheduler.prefill_tokens,
                steps=counters.steps,
                prompt_tokens=counters.prompt_tokens,
                cached_tokens=counters.cached_tokens,
                output_tokens=counters.output_tokens,
                requests=counters.requests,
                preemptions=core.scheduler.preemptions,
                aborted=counters.aborted,
                step_s=counters.step_s,
                busy_s=counters.busy_s,
                computed_tokens=counters.computed_tokens,
            )
        ]

    def dump(self, rank: int) -> None:
        if rank == RANK:
            self._tell(self._core.blocks.dump())

    def clear(self) -> None:
        self.drop(None, "", (ENGINE,))

    # which blocks are kept

    def release(self, sessions: list[str]) -> int:
        return self._keep(lambda kept, _: kept.release(sessions))

    def pin(self, pin: Pin) -> int:
        return self._keep(lambda kept, now: kept.pin(pin, now))

    def unpin(self, pin: str) -> int:
        return self._keep(lambda kept, now: kept.unpin(pin, now))

    def drop(self, salt: int | None, tenant: str, tiers: Container[int]) -> int:
        return self._keep(lambda kept, _: kept.clear(salt, tenant)) if ENGINE in tiers else 0

    def retention(self) -> list[RetentionState]:
        return [self._core.blocks.retention.state(RANK, asyncio.get_running_loop().time())]

    async def drain(self) -> None:
        await self._idle.wait()
        if self._handoffs is not None:
            await self._handoffs.drain()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._prefetches is not None:
            await self._prefetches.close()
        if self._handoffs is not None:
            await self._handoffs.close()
        if self._lower is not None:
            await self._lower.close()
        if self._loaded is not None:
            self._loaded[1].close()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._thread.shutdown), CLOSE_S)
        except TimeoutError:
            log.warning("a step of the model has not ended in %g s", CLOSE_S)

    # steps

    async def _run(self, core: TorchCore, sink: Sink) -> None:
        try:
            while True:
                self._wake.clear()
                if not core.busy:
                    if not self._moving:
                        self._idle.set()
                    await self._wake.wait()
                stepped = await self._step(core, sink)
                if not stepped and core.busy:
                    await self._news()
        except Exception as error:
            log.debug("the model failed", exc_info=error)
            sink.failed(EngineError(f"the torch engine died: {type(error).__name__}: {error}"))

    async def _news(self) -> None:
        """Wait until something may have changed: blocks have come, or are free again."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _step(self, core: TorchCore, sink: Sink) -> bool:
        """Take a step if there is anything to do."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        step, events = core.plan(start)
        self._tell(events)
        if self._lower is not None:
            self._lower.look()
        if not step.turns:
            return False
        await loop.run_in_executor(self._thread, core.run, step)
        seconds = loop.time() - start
        deltas, events = core.commit(step, seconds)
        self._tell(events)
        ready = (
            self._prefetches.without_prefetches(deltas) if self._prefetches is not None else deltas
        )
        if self._handoffs is not None:
            ready = self._handoffs.pass_on(ready, sink.output)
        if ready:
            sink.output(ready)
        if self._lower is not None:
            self._lower.stepped(step, deltas, seconds)
        return True

    async def _open_lower(self, core: TorchCore, store: StoreFactory) -> None:
        arenas = ArenaTensors(core.model.device)
        client = store(core.model.layout, arenas)
        patience = self._worker.hang_timeout_s / 3
        options = LowerOptions(
            wait_s=min(self._worker.shared_wait_s, patience),
            deadline_s=patience,
            queue=self._worker.write_through_blocks,
        )
        self._lower = core.lower = LowerTiers(core, client, arenas, options, self._on_moved)
        await self._lower.open()

    async def _open_handoffs(self, core: TorchCore) -> Handoffs:
        try:
            transport = await Transport.open(self._transfer)
        except TransferError as error:
            raise EngineError(f"cannot move KV blocks: {error}") from error
        return Handoffs(core, transport, self._transfer, self._on_moved)

    @property
    def _moving(self) -> int:
        return self._handoffs.moving if self._handoffs is not None else 0

    def _keep(self, change: Callable[[RetentionManager, float], int]) -> int:
        """Change what is kept, and tell what went because of it."""
        blocks = change(self._core.blocks.retention, asyncio.get_running_loop().time())
        self._tell(self._core.take_events())
        return blocks

    def _on_moved(self) -> None:
        self._tell(self._core.take_events())
        self._wake.set()

    def _tell(self, events: list[KvEvent]) -> None:
        if events and self._sink is not None:
            self._sink.events(RANK, events)

    @property
    def _core(self) -> TorchCore:
        if self._loaded is None:
            raise RuntimeError("the engine has not started")
        return self._loaded[0]

    def _load(self) -> tuple[TorchCore, Grammars]:
        options, block_size = self._options, self._worker.block_size
        torch.set_num_threads(options.threads or _half_of_the_cores())
        model = load_model(
            self._folder, options.dtype, options.device, block_size, options.pass_tokens
        )
        blocks = options.blocks or options.kv_bytes // model.layout.block_bytes
        if not blocks:
            size = model.layout.block_bytes
            raise EngineConfigError(f"kv_bytes {options.kv_bytes} holds no block of {size} bytes")
        model.allocate(blocks)
        most_s = self._worker.compile_timeout_s
        grammars = Grammars(self._folder, model.vocabulary, model.stop_tokens, most_s)
        grammars.load()
        limits = SchedulerLimits(
            block_size=block_size,
            max_sequences=options.max_sequences,
            max_batched_tokens=options.max_batched_tokens,
            watermark=options.watermark,
        )
        longest = self._worker.context or model_context(self._folder)
        keeping = retention_options(self._worker)
        core = TorchCore(model, limits, blocks, min(longest, blocks * block_size), keeping)
        return core, grammars


def _sampler(work: Work, model: PagedModel, grammars: Grammars) -> Sampler:
    """Raises Rejected for a constraint that cannot be followed."""
    sampling = work.sampling
    tokens = memoryview(work.tokens).cast("I").tolist()
    base = len(tokens) - work.generated
    constraint = grammars.constraint(sampling.guided) if sampling.guided is not None else None
    seed = secrets.randbits(64)
    return Sampler(sampling, tokens[:base], tokens[base:], model.stop_tokens, seed, constraint)


def _half_of_the_cores() -> int:
    """As a power of two: work is then cut at the same places whatever its size."""
    half = max(1, (os.cpu_count() or 1) // 2)
    return 1 << (half.bit_length() - 1)
