"""Replies to overlap queries: the index's rows, with its rank numbers replaced by rank keys."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmesh.bus.messages import OverlapQuery, OverlapReply, RankKey
from kvmesh.index.interface import TIERS, PrefixIndex

COLUMNS = 1 + TIERS
Rows: TypeAlias = npt.NDArray[np.uint32]
NO_ROWS = np.empty((0, COLUMNS), dtype="<u4")


def answer(
    index: PrefixIndex, keys: Sequence[RankKey], query: OverlapQuery, lag: float
) -> OverlapReply:
    """Match every prompt of `query`. Raises ValueError if one is not a whole number of hashes.

    `keys[n]` is the key of rank number n; `lag` is the index's lag in seconds.
    """
    tables = [_table(rows) for rows in index.find_batch(list(query.prompts))]
    if len(tables) == 1:
        numbers = tables[0][:, 0]
        ranks = [keys[number] for number in numbers.tolist()]
        return OverlapReply(ranks, [_numbered(tables[0], np.arange(len(numbers)))], lag)
    numbers = np.unique(np.concatenate([NO_ROWS, *tables])[:, 0])
    positions = np.zeros(len(keys), dtype="<u4")
    positions[numbers] = np.arange(len(numbers))
    rows = [_numbered(table, positions[table[:, 0]]) for table in tables]
    return OverlapReply([keys[number] for number in numbers.tolist()], rows, lag)


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
    lag = 0.0
    for prompts, reply in parts:
        lag = max(lag, reply.lag)
        indices = [ranks.setdefault(key, len(ranks)) for key in reply.ranks]
        for prompt, table in zip(prompts, reply.rows, strict=True):
            if table:
                own = _table(table)
                rows[prompt] = _numbered(own, np.array(indices, dtype="<u4")[own[:, 0]])
    return OverlapReply(list(ranks), rows, lag)
