"""What one forward pass works on: rows of several sequences, side by side, as tensors.

Numeric libraries pick their kernels, and with them the order of sums, by the shape of what they
work on: a token would get slightly different numbers alone, in a batch, or behind a longer prompt.
So every pass has the same number of tokens, the last ones padding, and all shapes are fixed.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

QUERY_TILE = 8


class BatchRow(NamedTuple):
    """Consecutive tokens of one sequence from place `start` on, whose blocks are at `places`.

    `last` says whether the logits after the last of them are wanted.
    """

    tokens: Items[int]
    start: int
    places: list[int]
    last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def cut(rows: Iterable[BatchRow], size: int) -> list[list[BatchRow]]:
    """The same tokens in passes of at most `size`, in order."""
    passes: list[list[BatchRow]] = []
    room = 0
    for row in rows:
        start = 0
        while start < len(row.tokens):
            if not room:
                passes.append([])
                room = size
            count = min(room, len(row.tokens) - start)
            last = row.last and start + count == len(row.tokens)
            part = row.tokens[start : start + count]
            passes[-1].append(BatchRow(part, row.start + start, row.places, last))
            start += count
            room -= count
    return passes


class Batch:
    """All rows flat, one token after the other, and cut into tiles of queries for attention.

    There are `size` tokens, of which only the first are real; the KV of the others goes to place
    `scratch`. Tiles are in order of the last position in them, longest first, so that those which
    need a range of keys come first.
    """

    def __init__(
        self, rows: Items[BatchRow], size: int, block_size: int, scratch: int, device: torch.device
    ) -> None:
        def tensor(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        def padded(values: list[int], value: int = 0) -> Tensor:
            return tensor(values + [value] * (size - len(values)))

        tiles = _tiles(rows)
        width = max(len(row.places) for row in rows)
        wanted = _wanted(rows)
        self.wanted_count = len(wanted)
        self.tokens = padded([t for row in rows for t in row.tokens])
        self.positions = padded([p for row in rows for p in range(row.start, row.end)])
        slots = padded(_slots(rows, block_size), scratch * block_size)
        self.slots = (slots // block_size, slots % block_size)
        self.wanted = padded(wanted) if wanted else tensor([0])
        self.lasts = [tile.last for tile in tiles]
        self.tables = tensor(
            [tile.row.places + [0] * (width - len(tile.row.places)) for tile in tiles]
        )
        self.queries = tensor([tile.queries for tile in tiles])
        self.query_positions = tensor([tile.positions for tile in tiles])
        self.returns = padded(_returns(tiles))


class _Tile(NamedTuple):
    """At most QUERY_TILE tokens of a row: flat indices and positions, padded with 0 and -1."""

    row: BatchRow
    size: int
    queries: list[int]
    positions: list[int]

    @property
    def last(self) -> int:
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
    return sorted(tiles, key=lambda tile: -tile.last)


def _slots(rows: Items[BatchRow], block_size: int) -> list[int]:
    return [
        row.places[p // block_size] * block_size + p % block_size
        for row in rows
        for p in range(row.start, row.end)
    ]


def _wanted(rows: Items[BatchRow]) -> list[int]:
    ends: list[int] = []
    flat = 0
    for row in rows:
        flat += len(row.tokens)
        if row.last:
            ends.append(flat - 1)
    return ends


def _returns(tiles: Items[_Tile]) -> list[int]:
    """For each flat token, its place among the tiles' tokens."""
    places = [0] * sum(tile.size for tile in tiles)
    for index, tile in enumerate(tiles):
        for offset, flat in enumerate(tile.queries[: tile.size]):
            places[flat] = index * QUERY_TILE + offset
    return places
