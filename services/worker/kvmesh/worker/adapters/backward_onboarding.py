"""Loads blocks from a kvbm into an engine that computes the same prompts meanwhile."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from kvmesh.blocks.kvbm_client import FetchedPart, KvbmClient, KvbmPrompt, TierSpeeds
from kvmesh.bus.messages import Retain
from kvmesh.worker.enginecore.backward_load import BackwardLoad, LoadBatch
from kvmesh.worker.enginecore.scheduler import Scheduler
from kvmesh.worker.enginecore.sequence import Sequence, SequenceState

log = logging.getLogger(__name__)


class BatchCopier(Protocol):
    """Copies batches of blocks into an engine."""

    async def copy_in(
        self, sequence: Sequence, batch: LoadBatch, prompt: KvbmPrompt, part: FetchedPart
    ) -> int:
        """Copy a batch, which `part` has; return the number of its last blocks that are valid.

        The copier reports the block before them as corrupt. It is called with the arena mapped;
        `batch.abandoned` may change meanwhile.
        """
        ...


class OnboardingPrompt:
    """A prompt whose blocks arrive in `parts`, until a copy has `failed`."""

    def __init__(self, prompt: KvbmPrompt) -> None:
        self.prompt = prompt
        self.failed = False
        self.parts: list[FetchedPart] = []
        self.load: BackwardLoad | None = None

    @property
    def retention(self) -> list[Retain]:
        return [claim for part in self.parts for claim in part.retention]

    def part_of(self, batch: LoadBatch) -> FetchedPart:
        """The part that has the blocks of a batch."""
        return next(part for part in reversed(self.parts) if part.first <= batch.first)


class BackwardOnboarding:
    """Lets sequences of `scheduler` that wait for a kvbm compute while their blocks are loaded.

    One batch is copied at a time. `on_change` is called after changes that the scheduler acts on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        client: KvbmClient,
        copier: BatchCopier,
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._client = client
        self._copier = copier
        self._on_change = on_change
        self._prompts: dict[Sequence, OnboardingPrompt] = {}
        self._mover: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the copy in progress."""
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.wait([self._mover])

    async def load(
        self,
        sequence: Sequence,
        prompt: KvbmPrompt,
        speeds: TierSpeeds,
        wait_s: float,
        deadline_s: float,
    ) -> None:
        """Load the blocks of a waiting sequence until it is cancelled, for `deadline_s` at most.

        Cancel it once `ended` has the sequence. Ends at once if the kvbm has no blocks.
        """
        began = asyncio.get_running_loop().time()
        held = sequence.full_blocks
        loading = self._client.load(prompt, held, speeds, wait_s, deadline_s, overlaps=True)
        onboarding = OnboardingPrompt(prompt)
        try:
            async with aclosing(loading) as parts:
                async for part in parts:
                    if onboarding.failed:
                        return
                    if part.offsets:
                        self._offer(sequence, onboarding, part)
                    if not part.pending and onboarding.load is not None:
                        onboarding.load.pending = False
                        self._on_change()
                        await self._wait_until(began + deadline_s)
        finally:
            if onboarding.load is not None:
                self._scheduler.backward.stop(sequence, onboarding.load)
                self._on_change()

    def ended(self) -> list[Sequence]:
        """Sequences that need no more blocks, each once; they inherit what their blocks bring."""
        over = [s for s, prompt in self._prompts.items() if s.arriving is not prompt.load]
        for sequence in over:
            retention = self._prompts.pop(sequence).retention
            if retention:
                self._scheduler.inherit_claims(sequence, retention)
        return over

    def move(self) -> None:
        """Start to copy, if there is anything to copy."""
        if self._prompts and (self._mover is None or self._mover.done()):
            self._mover = asyncio.create_task(self._move(), name="onboarding copies")

    def _offer(self, sequence: Sequence, onboarding: OnboardingPrompt, part: FetchedPart) -> None:
        load = onboarding.load
        if load is None:
            if sequence.state is not SequenceState.LOADING:
                return
            now = asyncio.get_running_loop().time()
            load = onboarding.load = self._scheduler.begin_backward(sequence, now)
            self._prompts[sequence] = onboarding
        onboarding.parts.append(part)
        load.extend(part.tiers[max(0, load.end - part.first) :])
        self.move()
        self._on_change()

    async def _wait_until(self, deadline: float) -> None:
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))

    async def _move(self) -> None:
        backward, clock = self._scheduler.backward, asyncio.get_running_loop().time
        while (chosen := backward.next_batch(clock())) is not None:
            sequence, batch = chosen
            onboarding, valid = self._prompts[sequence], 0
            part = onboarding.part_of(batch)
            try:
                with part.attachment.in_use():
                    valid = await self._copier.copy_in(sequence, batch, onboarding.prompt, part)
            except Exception:  # the rest of the prompt is computed; those of others are loaded
                log.exception("request %s: cannot copy blocks", sequence.request.id)
                onboarding.failed = True
                if onboarding.load is not None:
                    backward.stop(sequence, onboarding.load)
            finally:
                backward.finish(sequence, batch, valid)
                self._on_change()
