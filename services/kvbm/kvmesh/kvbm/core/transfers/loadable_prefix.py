"""The part of a prompt that is worth loading, from the blocks held and those in progress."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

from kvmesh.kvbm.core.blocks.block import ARENA, REMOTE, Block
from kvmesh.kvbm.core.blocks.load_cost import CostStep, EngineSpeed, blocks_worth_loading
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress, RequestKey
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

Found: TypeAlias = Sequence[Block | None]


class LoadablePrefix:
    """Measures prefixes of prompts against what the node holds and computes."""

    def __init__(self, store: Store, in_progress: BlocksInProgress) -> None:
        self._store = store
        self._in_progress = in_progress

    def worth_loading(
        self, prompt: PromptBlocks, engine: EngineSpeed, found: Found, overlaps: bool = False
    ) -> int:
        """Number of leading blocks of `found`, consecutive blocks, that are worth loading.

        With `overlaps`, those in the arena are: an engine takes as many as arrive in time.
        """
        ready = 0
        while overlaps and ready < len(found) and _in_arena(found[ready]):
            ready += 1
        if ready:
            return ready + self.worth_loading(prompt, engine, found[ready:])
        tiers = [ARENA if b is None or ARENA in b.copies else min(b.copies) for b in found]
        steps = [self._step(prompt, tier, len(list(same))) for tier, same in groupby(tiers)]
        count = blocks_worth_loading(steps, engine, block_size(prompt))
        self._store.counts.declined += len(found) - count
        return count

    def is_lookup_worthwhile(self, ticket: ReadTicket) -> bool:
        """True if the rest of a prompt would be loaded if the remote tier had it."""
        prompt, left = ticket.prompt, len(ticket.prompt) - ticket.end
        if self._store.remote is None or not left:
            return False
        speed = self._store.traffic[REMOTE, ARENA].speed(self._store.now)
        step = CostStep(prompt.space.block_bytes, speed, 0, left)
        return blocks_worth_loading([step], ticket.engine, block_size(prompt)) > 0

    def end(
        self, prompt: PromptBlocks, found: Found, start: int, request: RequestKey | None, wait: bool
    ) -> int:
        """End of the longest prefix whose blocks some tier has or, with `wait`, others compute.

        `found` are the last blocks of the prompt, including those from `start` on.
        """
        skipped = len(prompt) - len(found)
        for index in range(start, len(prompt)):
            if found[index - skipped] is None:
                by = self._in_progress.request_of(prompt.digests[index]) if wait else None
                if by is None or by == request:
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


def _in_arena(block: Block | None) -> bool:
    return block is not None and block.registered(ARENA) is not None
