"""Cached tokens that engines serve beside those that placements expect of them. Pure.

Only this comparison shows an index that is wrong together with the worker's own record of its
engine's blocks: both are made of the same KV events.
"""

from collections.abc import Sequence
from itertools import zip_longest


def expected_tokens(
    overlap: Sequence[int], block_size: int, prompt_tokens: int, announced: int | None = None
) -> list[int]:
    """Cached tokens by tier of a prompt with an `overlap` in blocks; its last one is computed.

    A router's overlap has blocks that it predicts: with `announced`, only as many leading blocks
    count, those that the index knows (`PossibleHits.chosen`).
    """
    if not any(overlap):
        return [0] * len(overlap)
    left = max(prompt_tokens - 1, 0) // block_size * block_size if block_size else 0
    if announced is not None:
        left = min(left, announced * block_size)
    expected = []
    for blocks in overlap:
        expected.append(min(blocks * block_size, left))
        left -= expected[-1]
    return expected


class ServedTokens:
    """Sums over the prompts of one worker, in tokens: expected and served ones by tier.

    `unexpected` are those that prompts were served beyond the expected ones, and `missing` those
    that they were not: a surplus of one prompt does not make up for the lack of another.
    """

    __slots__ = ("expected", "missing", "requests", "served", "unexpected")

    def __init__(self) -> None:
        self.requests = 0
        self.expected: list[int] = []
        self.served: list[int] = []
        self.unexpected = 0
        self.missing = 0

    def add(self, expected: Sequence[int], served: Sequence[int], running: int = 0) -> None:
        """Add a prompt; requests that ran at its placement had `running` leading tokens of it."""
        self.requests += 1
        self.expected = _sums(self.expected, expected)
        self.served = _sums(self.served, served)
        wanted, found = sum(expected), sum(served)
        self.unexpected += max(found - max(wanted, running), 0)
        self.missing += max(wanted - found, 0)

    @property
    def difference(self) -> list[int]:
        """Served minus expected tokens, by tier."""
        pairs = zip_longest(self.served, self.expected, fillvalue=0)
        return [served - expected for served, expected in pairs]


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [left + right for left, right in zip_longest(one, other, fillvalue=0)]
