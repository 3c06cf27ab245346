"""One rank of the mock in real time: sleeps until the end of each step, then emits its results."""

import asyncio
import logging
from array import array
from collections.abc import Callable, Container
from math import isinf
from typing import Protocol, TypeAlias

from kvmesh.bus.messages import Clear, KvEvent, Load, Removed
from kvmesh.worker.clearing import ClearOutcome, in_use, named_tiers
from kvmesh.worker.engine import EngineError, OutputDelta, Sink
from kvmesh.worker.enginecore.retention import RetentionManager
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.worker.enginecore.simulated_tiers import TIERS
from kvmesh.worker.engines.mock.core import MockCore, StepResult
from kvmesh.worker.engines.mock.faults import Faults, InjectedCrash

log = logging.getLogger(__name__)
EARLY_S = 0.0005  # the loop waits for whole milliseconds: output that is due sooner is due now
LATE_S = 1.0
Change: TypeAlias = Callable[[RetentionManager, float], int]


class KvbmLink(Protocol):
    """The rank's link to the kvbm of its node."""

    def poll(self) -> None:
        """Called after a step was taken in the core."""
        ...

    def settle(self, seconds: float) -> None:
        """Called after the `seconds` of the steps."""
        ...

    def ended(self, request: str) -> None:
        """Called with each request that has left the engine."""
        ...


class MockRank:
    """Steps `core` while it has work, one step per call; overdue steps are taken together.

    With `tick_s`, each call takes all steps that fit into that many seconds.
    """

    def __init__(
        self, rank: int, core: MockCore, sink: Sink, faults: Faults, tick_s: float
    ) -> None:
        self.rank = rank
        self.core = core
        self.idle = asyncio.Event()
        self.idle.set()
        self._sink = sink
        self._faults = faults
        self._poisoned = ""
        self._counts_steps = faults != Faults()
        self._tick_s = tick_s
        self._wake = asyncio.Event()
        self._aborted: set[str] = set()
        self._unpublished: list[KvEvent] = []
        self._batches = 0
        self._task: asyncio.Task[None] | None = None
        self.kvbm: KvbmLink | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"mock rank {self.rank}")
        self._task.add_done_callback(self._on_done)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def submit(self, request: Request) -> None:
        """Queue a request; raises ValueError as the core does."""
        self.core.submit(request)
        self.idle.clear()
        self._wake.set()

    def poison(self, effect: str) -> None:
        """Make the next step fail: "crash" ends the engine, any other effect hangs it."""
        self._poisoned = effect

    def wake(self) -> None:
        """End a wait for KV to arrive."""
        self._wake.set()

    def abort(self, request: str) -> bool:
        """Drop a request; the output of the step in progress for it is discarded."""
        self._aborted.add(request)
        if self.kvbm is not None:
            self.kvbm.ended(request)
        return self.core.abort(request)

    def change_retention(self, change: Change) -> int:
        """Apply `change` to each tier; return the greatest number of blocks affected in one."""
        now = asyncio.get_running_loop().time()
        return max(change(manager.retention, now) for manager in self.core.block_managers)

    def drop_blocks(self, change: Change, tiers: Container[int] = TIERS) -> int:
        """Drop blocks by `change` from `tiers` and publish that.

        Returns the number of distinct blocks.
        """
        self.publish_events()
        now = asyncio.get_running_loop().time()
        for manager in self.core.block_managers:
            if manager.tier in tiers:
                change(manager.retention, now)
        events = self.core.take_events()
        self._send(events)
        removed = [array("Q", event.engine) for event in events if isinstance(event, Removed)]
        return len({block for blocks in removed for block in blocks})

    def clear(self, command: Clear) -> ClearOutcome:
        """Drop the blocks that a command names, but for those in use."""
        tiers, namespace = named_tiers(command), (command.salt, command.tenant)
        blocks = self.drop_blocks(lambda manager, _: manager.clear(*namespace), tiers)
        kept = dict[int, str]()
        for manager in self.core.block_managers:
            if manager.tier in tiers:
                kept |= in_use(manager.retention.held(*namespace), manager.tier)
        return ClearOutcome(blocks, kept)

    def publish_events(self) -> None:
        """Publish all changes so far, those of the step in progress included, in order."""
        events, self._unpublished = self._unpublished, []
        events += self.core.take_events()
        self._send(events)

    def load(self, instance: str) -> Load:
        return self.core.load(instance, self.rank)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if not self.core.busy:
                self.idle.set()
                await self._wake.wait()
            await self._run_busy()

    async def _run_busy(self) -> None:
        clock = asyncio.get_running_loop().time
        at = clock()
        while self.core.busy:
            self._aborted.clear()
            if self._counts_steps or self._poisoned:
                await self._maybe_fail()
                self.core.slowdown = self._faults.slowdown(self.core.counters.steps + 1)
            behind = 0.0 if self._counts_steps else clock() - at
            result = self.core.step(at, max(self._tick_s, behind))
            if self.kvbm is not None:
                self.kvbm.poll()
            if not result.steps:
                self._unpublished = result.events
                self._deliver(result)
                await self._sleep_until_woken(result.duration)
                at = clock()
                continue
            self._unpublished = result.events
            at += result.duration
            late = clock() - at
            if late < -EARLY_S:
                await asyncio.sleep(-late)
            elif late > LATE_S:
                at = clock()
            if self.kvbm is not None:
                self._settle(self.kvbm, result)
            self._deliver(result)
            if late >= -EARLY_S:  # its output has left before others run
                await asyncio.sleep(0)

    async def _maybe_fail(self) -> None:
        step = self.core.counters.steps + 1
        self._faults.check_crash(step)
        if self._poisoned == "crash":
            raise InjectedCrash(step)
        if self._poisoned or self._faults.hangs(step):
            log.warning("injected hang at step %d", step)
            await asyncio.Event().wait()

    async def _sleep_until_woken(self, duration: float) -> None:
        """Wait `duration` seconds for KV to arrive, or until a request arrives."""
        self._wake.clear()
        try:
            async with asyncio.timeout(None if isinf(duration) else duration):
                await self._wake.wait()
        except TimeoutError:
            return

    def _settle(self, kvbm: KvbmLink, result: StepResult) -> None:
        kvbm.settle(result.duration)
        for output in result.outputs:
            if output.finish is not None:
                kvbm.ended(output.request)

    def _deliver(self, result: StepResult) -> None:
        self.publish_events()
        if not result.outputs:
            return
        deltas = [
            OutputDelta(
                output.request,
                output.tokens,
                output.finish,
                cached=output.cached,
                retention=output.retention,
                decode=output.decode,
                admitted_at=output.admitted_at,
                loaded_at=output.loaded_at,
            )
            for output in result.outputs
            if output.request not in self._aborted
        ]
        if deltas:
            self._sink.output(deltas)

    def _send(self, events: list[KvEvent]) -> None:
        if not events:
            return
        self._batches += 1
        if self._faults.loses(self._batches):
            log.warning("injected loss of %d KV events", len(events))
            self._sink.events_lost(self.rank, len(events))
        else:
            self._sink.events(self.rank, events)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._sink.failed(EngineError(f"the mock engine died: {error}"))
