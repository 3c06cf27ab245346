"""Numbers the blocks of prompts in order of appearance."""

from collections.abc import Iterator

import numpy as np

from kvmesh.workload.model import Round, Workload
from kvmesh.workload.tree import mix


class BlockIds:
    """Ids of blocks of `size` tokens; the ids of partial blocks are never those of full ones."""

    def __init__(self, workload: Workload, size: int) -> None:
        self.size = size
        self._tree = workload.tree
        self._ids: dict[int | tuple[int, int, int], int] = {}

    def of(self, round_: Round) -> list[int]:
        """One id per started block of a prompt; a partial last block is never shared."""
        tokens = round_.input_tokens
        blocks = self._tree.blocks(round_.branch, tokens, self.size).tolist()
        if tokens % self.size:
            last = self._tree.path(round_.branch, tokens)[-1].branch
            blocks.extend(mix(last, np.array([tokens])).tolist())
        ids = self._ids
        return [ids.setdefault(block, len(ids)) for block in blocks]

    def added(self, round_: Round, start: int) -> list[int]:
        """One id per started block of the tokens from `start` to the end of a prompt."""
        ids = self._ids
        return [ids.setdefault(block, len(ids)) for block in self._added(round_, start)]

    def _added(self, round_: Round, start: int) -> Iterator[tuple[int, int, int]]:
        """(branch, first token, end) of each block; the branch is that of the last token."""
        tokens = round_.input_tokens
        parts = iter(self._tree.path(round_.branch, tokens))
        part = next(parts)
        for first in range(start, tokens, self.size):
            end = min(first + self.size, tokens)
            while part.end < end:
                part = next(parts)
            yield part.branch, first, end
