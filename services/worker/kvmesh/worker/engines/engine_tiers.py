"""The kvbm below an engine that schedules sequences itself: onboarding and write-through.

The event loop owns all state.
"""

import asyncio
import logging
from abc import abstractmethod
from array import array
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, NamedTuple, TypeVar

from kvmesh.blocks.kvbm_client import FetchedPart, KvbmClient, KvbmPrompt, TierSpeeds, digest_of
from kvmesh.blocks.write_through import BlockSource, WriteThrough
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.settings.schema import WorkerSettings
from kvmesh.tracing.names import ONBOARD
from kvmesh.tracing.names import TIERS as LOADED_TIERS
from kvmesh.tracing.tracer import continued
from kvmesh.worker.adapters.backward_onboarding import BackwardOnboarding, BatchCopier
from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.enginecore.scheduler import Scheduler
from kvmesh.worker.enginecore.sequence import Sequence, SequenceState
from kvmesh.worker.enginecore.simulated_tiers import TIERS

log = logging.getLogger(__name__)
Item = TypeVar("Item")


class TierLimits(NamedTuple):
    """A load waits up to `wait_s` for blocks that other workers compute, and ends after
    `deadline_s`. Up to `queue` blocks wait for write-through."""

    wait_s: float
    deadline_s: float
    queue: int


def tier_limits(worker: WorkerSettings) -> TierLimits:
    """The limits of `[worker]`."""
    deadline_s = worker.hang_timeout_s / 3
    wait_s = min(worker.shared_wait_s, deadline_s)
    return TierLimits(wait_s, deadline_s, worker.write_through_blocks)


class EngineTiers(BlockSource[Item], BatchCopier, Generic[Item]):
    """Moves blocks between the sequences of a scheduler and a kvbm; an `Item` is written at once.

    `on_change` is called after changes of the block manager.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        client: KvbmClient,
        limits: TierLimits,
        on_change: Callable[[], None],
    ) -> None:
        self.writer: WriteThrough[Item] = WriteThrough(client, self, limits.queue)
        self._scheduler = scheduler
        self._client = client
        self._limits = limits
        self._on_change = on_change
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}
        self._onboarding = BackwardOnboarding(scheduler, client, self, on_change)
        self._touches = BackgroundTasks()
        self._loaded = [0] * len(TIERS)
        self._corrupt = 0
        self._compute_speed = Throughput()
        self._load_speed = Throughput()

    @abstractmethod
    async def describe(self, sequence: Sequence, hashes: "array[int]") -> KvbmPrompt | None:
        """The leading blocks of a sequence, which have these hashes; None without a kvbm."""

    def looked_up(self, sequence: Sequence) -> None:
        """Called before the kvbm is asked for the blocks of a sequence that waits."""

    def traceparent(self, sequence: Sequence) -> str:
        """The trace that has the sequence's loads as a span; empty for none."""
        return ""

    @property
    def counts(self) -> TierCounts:
        return TierCounts(
            loaded=self._loaded,
            written=self.writer.written,
            skipped=self.writer.skipped,
            corrupt=self._corrupt,
        )

    @property
    def available(self) -> bool:
        """True while attached to a kvbm: sequences wait for blocks from there."""
        return self._client.key is not None

    @property
    def speeds(self) -> TierSpeeds:
        return TierSpeeds(compute_tps=self._compute_speed.value, load_bps=self._load_speed.value)

    @property
    def load_ratio(self) -> float:
        """The time to load a block over the time to compute it; 0 if unknown."""
        return self.speeds.load_ratio(self._client.worker.layout)

    async def open(self) -> None:
        await self._client.open()
        self.writer.start()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._onboarding.close()
        await self._touches.close()
        await self.writer.close()
        await self._client.close()

    def poll(self) -> None:
        """Start onboarding for sequences that wait; end it for those that need no more blocks."""
        over = self._onboarding.ended()
        for sequence in [s for s in self._tasks if s in over or not s.awaits_blocks]:
            self._tasks.pop(sequence).cancel()
        for sequence in self._scheduler.loading:
            if sequence not in self._tasks and sequence.ready_at == float("inf"):
                self.looked_up(sequence)
                task = asyncio.create_task(self._onboard(sequence), name="onboarding")
                self._tasks[sequence] = task
        self._onboarding.move()

    def measure(self, tokens: int, seconds: float) -> None:
        """Measure the speed of prefills by a step of `tokens` prompt tokens."""
        if tokens >= MIN_MEASURED_TOKENS:
            self._compute_speed.record(tokens, seconds)
            self._scheduler.backward.token_s = 1 / self._compute_speed.value

    def touch(self, sequence: Sequence) -> None:
        """Let the kvbm record the use of a prompt that did not wait for it."""
        self._touches.start(self._send_touch(sequence), "touch")

    async def _send_touch(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.ENDED:
            return
        hashes = sequence.reusable
        prompt = await self.describe(sequence, hashes)
        if prompt is not None:
            loading = self._client.load(prompt, len(hashes), self.speeds, 0.0, 0.0)
            async with aclosing(loading) as parts:
                async for _ in parts:
                    break

    async def _onboard(self, sequence: Sequence) -> None:
        span = continued(self.traceparent(sequence), ONBOARD)
        try:
            prompt = await self.describe(sequence, sequence.reusable)
            if prompt is not None:
                wait_s, deadline_s, _ = self._limits
                await self._onboarding.load(sequence, prompt, self.speeds, wait_s, deadline_s)
        except (RuntimeError, ValueError, OSError) as error:
            log.error("request %s: cannot load blocks: %s", sequence.request.id, error)
            span.fail("load")
        finally:
            span.set(LOADED_TIERS, sequence.cached or [])
            span.end()
            if self._tasks.get(sequence) is asyncio.current_task():
                del self._tasks[sequence]
                self._scheduler.end_loading(sequence, asyncio.get_running_loop().time())
                self._on_change()

    def _on_corrupt(self, prompt: KvbmPrompt, part: FetchedPart, block: int) -> None:
        self._corrupt += 1
        log.warning("request %s: block %d has a wrong checksum", prompt.request, block)
        self._client.report_corrupt(part, digest_of(prompt, block))

    def drop(self, item: Item) -> None:
        pass
