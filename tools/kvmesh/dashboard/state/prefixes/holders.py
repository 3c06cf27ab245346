"""The ranks and block managers that hold the runs of a prompt tree, by tier. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.bus.messages import RankKey
from kvmesh.dashboard.state.prefixes.tree import PrefixRun, PromptTree
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.scoring.overlaps import TIERS, Overlaps

Blocks = NDArray[np.int64]
MOST_BYTES = 4 << 20  # of the prompts in one round of queries
NOBODY: Blocks = np.zeros((0, TIERS), np.int64)


class PrefixHolder(NamedTuple):
    """One rank, and its blocks of a run by tier."""

    instance: str
    rank: int
    engine: int
    host: int
    disk: int
    remote: int

    @property
    def blocks(self) -> int:
        return self.engine + self.host + self.disk + self.remote


@dataclass(frozen=True)
class RunHolders:
    """Holders of a run of `of` blocks, and their blocks of it by tier; None if unknown."""

    of: int
    ranks: list[RankKey]
    blocks: Blocks | None

    @property
    def held(self) -> float | None:
        """The share of the run that its best holder has."""
        if self.blocks is None or not self.of:
            return None
        return float(self.blocks.sum(axis=1).max(initial=0)) / self.of

    @property
    def by_tier(self) -> list[int]:
        """The number of holders with blocks in each tier."""
        return [] if self.blocks is None else (self.blocks > 0).sum(axis=0).tolist()

    def rows(self) -> list[PrefixHolder]:
        """All holders, the best first."""
        if self.blocks is None:
            return []
        order = np.argsort(-self.blocks.sum(axis=1), kind="stable").tolist()
        blocks = self.blocks.tolist()
        return [PrefixHolder(*_key(self.ranks[at]), *blocks[at]) for at in order]


UNKNOWN = RunHolders(0, [], None)


def questions(tree: PromptTree) -> dict[int, bytes]:
    """Prompts, by number, whose overlaps tell the holders of all runs; the heaviest first.

    Beyond MOST_BYTES the remaining runs stay unknown.
    """
    last = [run for run in tree.runs() if not run.merged and not _followed(run)]
    asked: dict[int, bytes] = {}
    left = MOST_BYTES
    for run in sorted(last, key=lambda run: run.weight, reverse=True):
        number = run.prompts[0]
        hashes = tree.prompts[number].hashes[: run.end * HASH_BYTES]
        if number not in asked and len(hashes) <= left:
            asked[number] = hashes
            left -= len(hashes)
    return asked


def holders(tree: PromptTree, found: Mapping[int, Overlaps]) -> dict[str, RunHolders]:
    """The holders of the runs by key; `found` are the overlaps of prompts by number."""
    tables = {number: _Table(overlaps) for number, overlaps in found.items()}
    result = {}
    for run in tree.runs():
        asked = next((number for number in run.prompts if number in tables), None)
        if asked is None or run.merged:
            result[run.key] = UNKNOWN
        else:
            result[run.key] = tables[asked].within(run)
    return result


class _Table:
    """The ranks that hold a prompt, and the blocks at which each tier of each of them ends."""

    def __init__(self, overlaps: Overlaps) -> None:
        rows = np.frombuffer(overlaps.rows, "<u4").reshape(-1, 1 + TIERS).astype(np.int64)
        self._ranks = [overlaps.ranks[at] for at in rows[:, 0].tolist()]
        self._ends = np.cumsum(rows[:, 1:], axis=1)

    def within(self, run: PrefixRun) -> RunHolders:
        ends = np.clip(self._ends, run.first, run.end)
        blocks = np.diff(ends, axis=1, prepend=run.first)
        some = np.flatnonzero(blocks.sum(axis=1))
        return RunHolders(run.blocks, [self._ranks[at] for at in some.tolist()], blocks[some])


def _followed(run: PrefixRun) -> bool:
    return any(not child.merged for child in run.children)


def _key(rank: RankKey) -> tuple[str, int]:
    return rank.instance, rank.rank
