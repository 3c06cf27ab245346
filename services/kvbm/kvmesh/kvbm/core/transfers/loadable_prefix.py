"""The part of a prompt that is worth loading: blocks that are there or on their way. Pure."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

from kvmesh.kvbm.core.blocks.block import ARENA, REMOTE, Block
from kvmesh.kvbm.core.blocks.load_cost import CostStep, EngineSpeed, worth
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress, Computer
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

Found: TypeAlias = Sequence[Block | None]


class LoadablePrefix:
    """Judges the blocks of prompts by what is held and what is announced."""

    def __init__(self, store: Store, announced: BlocksInProgress) -> None:
        self._store = store
        self._announced = announced

    def worth(self, prompt: PromptBlocks, engine: EngineSpeed, found: Found) -> int:
        """How many of these blocks, which follow each other, are worth loading."""
        tiers = [ARENA if b is None or ARENA in b.copies else min(b.copies) for b in found]
        steps = [self._step(prompt, tier, len(list(same))) for tier, same in groupby(tiers)]
        count = worth(steps, engine, block_size(prompt))
        self._store.counts.declined += len(found) - count
        return count

    def is_worth_a_lookup(self, reading: ReadTicket) -> bool:
        """Whether blocks that only the remote store may have would be loaded."""
        prompt, left = reading.prompt, len(reading.prompt) - reading.end
        if self._store.far is None or not left:
            return False
        speed = self._store.traffic[REMOTE, ARENA].speed(self._store.now)
        step = CostStep(prompt.space.block_bytes, speed, 0, left)
        return worth([step], reading.engine, block_size(prompt)) > 0

    def end(
        self, prompt: PromptBlocks, found: Found, start: int, computer: Computer | None, wait: bool
    ) -> int:
        """The end of the longest prefix that is somewhere, or that somebody else computes.

        `found` are the last blocks of the prompt, those from `start` on among them.
        """
        skipped = len(prompt) - len(found)
        for index in range(start, len(prompt)):
            if found[index - skipped] is None:
                by = self._announced.by(prompt.digests[index]) if wait else None
                if by is None or by == computer:
                    return index
        return len(prompt)

    def _step(self, prompt: PromptBlocks, tier: int, blocks: int) -> CostStep:
        size = prompt.space.block_bytes
        if tier == ARENA:
            return CostStep(size, 0.0, 0, blocks)
        traffic = self._store.traffic[tier, ARENA]
        return CostStep(size, traffic.speed(self._store.now), traffic.moving * size, blocks)


def block_size(prompt: PromptBlocks) -> int:
    """Tokens of a block."""
    return prompt.space.layout.block_size
