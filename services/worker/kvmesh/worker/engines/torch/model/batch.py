"""Input tensors of one forward pass: rows of several sequences in one flat batch.

Numeric libraries choose kernels, and with them the order of sums, by tensor shapes: a token would
get slightly different numbers alone, in a batch, or behind a longer prompt. So every pass is padded
to the same number of tokens, and all shapes are fixed.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

QUERY_TILE = 8


class BatchRow(NamedTuple):
    """Consecutive tokens of one sequence from position `start` on, and its block table.

    `wants_logits`: return the logits after the last of these tokens.
    """

    tokens: Items[int]
    start: int
    block_ids: list[int]
    wants_logits: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def split_rows(rows: Iterable[BatchRow], size: int) -> list[list[BatchRow]]:
    """Split rows into passes of at most `size` tokens, in order."""
    passes: list[list[BatchRow]] = []
    free = 0
    for row in rows:
        start = 0
        while start < len(row.tokens):
            if not free:
                passes.append([])
                free = size
            count = min(free, len(row.tokens) - start)
            last = row.wants_logits and start + count == len(row.tokens)
            part = row.tokens[start : start + count]
            passes[-1].append(BatchRow(part, row.start + start, row.block_ids, last))
            start += count
            free -= count
    return passes


class Batch:
    """All rows as one flat sequence of tokens, and as tiles of queries for attention.

    The batch is padded to `size` tokens; the KV of the padding goes to block `scratch`. Tiles are
    sorted by their last position, highest first, so those that need a range of keys come first.
    """

    def __init__(
        self, rows: Items[BatchRow], size: int, block_size: int, scratch: int, device: torch.device
    ) -> None:
        def tensor(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        def padded(values: list[int], value: int = 0) -> Tensor:
            return tensor(values + [value] * (size - len(values)))

        tiles = _tiles(rows)
        width = max(len(row.block_ids) for row in rows)
        logit_indices = _logit_indices(rows)
        self.logit_count = len(logit_indices)
        self.tokens = padded([t for row in rows for t in row.tokens])
        self.positions = padded([p for row in rows for p in range(row.start, row.end)])
        slot_mapping = padded(_slot_mapping(rows, block_size), scratch * block_size)
        self.slot_mapping = (slot_mapping // block_size, slot_mapping % block_size)
        self.logit_indices = padded(logit_indices) if logit_indices else tensor([0])
        self.last_positions = [tile.last_position for tile in tiles]
        self.block_tables = tensor(
            [tile.row.block_ids + [0] * (width - len(tile.row.block_ids)) for tile in tiles]
        )
        self.queries = tensor([tile.queries for tile in tiles])
        self.query_positions = tensor([tile.positions for tile in tiles])
        self.output_order = padded(_output_order(tiles))


class _Tile(NamedTuple):
    """Up to QUERY_TILE tokens of a row: flat indices padded with 0, positions padded with -1."""

    row: BatchRow
    size: int
    queries: list[int]
    positions: list[int]

    @property
    def last_position(self) -> int:
        return self.positions[self.size - 1]


def _tiles(rows: Items[BatchRow]) -> list[_Tile]:
    tiles: list[_Tile] = []
    flat = 0
    for row in rows:
        for start in range(row.start, row.end, QUERY_TILE):
            size = min(QUERY_TILE, row.end - start)
            padding = QUERY_TILE - size
            queries = [*range(flat, flat + size), *[0] * padding]
            positions = [*range(start, start + size), *[-1] * padding]
            tiles.append(_Tile(row, size, queries, positions))
            flat += size
    return sorted(tiles, key=lambda tile: -tile.last_position)


def _slot_mapping(rows: Items[BatchRow], block_size: int) -> list[int]:
    return [
        row.block_ids[p // block_size] * block_size + p % block_size
        for row in rows
        for p in range(row.start, row.end)
    ]


def _logit_indices(rows: Items[BatchRow]) -> list[int]:
    ends: list[int] = []
    flat = 0
    for row in rows:
        flat += len(row.tokens)
        if row.wants_logits:
            ends.append(flat - 1)
    return ends


def _output_order(tiles: Items[_Tile]) -> list[int]:
    """Index of each flat token among the tokens of all tiles."""
    order = [0] * sum(tile.size for tile in tiles)
    for index, tile in enumerate(tiles):
        for offset, flat in enumerate(tile.queries[: tile.size]):
            order[flat] = index * QUERY_TILE + offset
    return order
