"""Replies to overlap queries: the index's rows, with its rank numbers replaced by rank keys."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmesh.bus.messages import OverlapQuery, OverlapReply, RankKey, Removal
from kvmesh.index.interface import TIERS, PrefixIndex
from kvmesh.indexer.removed_blocks import RemovedBlocks

COLUMNS = 1 + TIERS
Rows: TypeAlias = npt.NDArray[np.uint32]
NO_ROWS = np.empty((0, COLUMNS), dtype="<u4")


def answer(
    index: PrefixIndex,
    keys: Sequence[RankKey],
    query: OverlapQuery,
    lag: float,
    removed: RemovedBlocks,
) -> OverlapReply:
    """Match every prompt of `query`. Raises ValueError if one is not a whole number of hashes.

    `keys[n]` is the key of rank number n; `lag` is the index's lag in seconds.
    """
    tables = [_table(rows) for rows in index.find_batch(list(query.prompts))]
    removals: list[list[Removal]] = []
    if removed.enabled:
        removals = [
            removed.find(prompt, _longest(table))
            for prompt, table in zip(query.prompts, tables, strict=True)
        ]
    removals = removals if any(removals) else []
    since = removed.since if removed.enabled else 0.0
    if len(tables) == 1:
        numbers = tables[0][:, 0]
        ranks = [keys[number] for number in numbers.tolist()]
        rows = [_numbered(tables[0], np.arange(len(numbers)))]
        return OverlapReply(ranks, rows, lag, removals, since)
    numbers = np.unique(np.concatenate([NO_ROWS, *tables])[:, 0])
    positions = np.zeros(len(keys), dtype="<u4")
    positions[numbers] = np.arange(len(numbers))
    rows = [_numbered(table, positions[table[:, 0]]) for table in tables]
    ranks = [keys[number] for number in numbers.tolist()]
    return OverlapReply(ranks, rows, lag, removals, since)


def _longest(table: Rows) -> int:
    """The longest overlap of a rank, over all tiers, in blocks."""
    return int(table[:, 1:].sum(axis=1).max()) if len(table) else 0


def _table(rows: bytes) -> Rows:
    return np.frombuffer(rows, dtype="<u4").reshape(-1, COLUMNS)


def _numbered(table: Rows, ranks: npt.NDArray[np.integer]) -> bytes:
    """The table with `ranks` as its first column."""
    table = table.copy()
    table[:, 0] = ranks
    return table.tobytes()


def merge(count: int, parts: Iterable[tuple[list[int], OverlapReply]]) -> OverlapReply:
    """One reply to `count` prompts from the replies of several shards.

    Each part is the indices of its prompts and the shard's reply. A prompt is known to one shard
    only, so at most one part has rows for it.
    """
    ranks: dict[RankKey, int] = {}
    rows = [b""] * count
    removals: list[list[Removal]] = [[] for _ in range(count)]
    lag = since = 0.0
    for prompts, reply in parts:
        lag, since = max(lag, reply.lag), max(since, reply.since)
        indices = [ranks.setdefault(key, len(ranks)) for key in reply.ranks]
        for prompt, table in zip(prompts, reply.rows, strict=True):
            if table:
                own = _table(table)
                rows[prompt] = _numbered(own, np.array(indices, dtype="<u4")[own[:, 0]])
        for prompt, found in zip(prompts, reply.removals, strict=False):
            removals[prompt] = removals[prompt] or found
    return OverlapReply(list(ranks), rows, lag, removals if any(removals) else [], since)
