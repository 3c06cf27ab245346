"""The token tree: prefix sharing between prompts, without any token."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = -1
_MASK = 0xFFFFFFFFFFFFFFFF
_STEP = 0xD1B54A32D192ED03
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class TokenSegment(NamedTuple):
    """Token positions `start` to `end` (exclusive) of a prompt, on `branch`."""

    branch: int
    start: int
    end: int


class Tree:
    """A tree of branches; each continues its parent from token position `start` on.

    A prompt is `(branch, tokens)`: the first `tokens` tokens on the path from the root along the
    branch. Two prompts share exactly the tokens before the position at which their paths diverge.
    `parents` and `starts` are the columns of all branches, to be read only.
    """

    def __init__(self) -> None:
        self.parents = array("q")
        self.starts = array("q")

    def __len__(self) -> int:
        return len(self.parents)

    def fork(self, parent: int = ROOT, start: int = 0) -> int:
        """Add a branch that diverges from `parent` at token `start`; ROOT and 0 share nothing.

        Raises ValueError if `parent` does not exist or `start` is not on its path.
        """
        if not ROOT <= parent < len(self.parents) or start < 0 or (parent == ROOT and start):
            raise ValueError(f"no token {start} on branch {parent}")
        while parent != ROOT and start <= self.starts[parent]:
            parent = self.parents[parent]
        self.parents.append(parent)
        self.starts.append(start)
        return len(self.parents) - 1

    def parent(self, branch: int) -> tuple[int, int]:
        """(parent branch or ROOT, token position) of a branch."""
        return self.parents[branch], self.starts[branch]

    def path(self, branch: int, tokens: int) -> list[TokenSegment]:
        """The segments of a prompt, first token first."""
        return [TokenSegment(*part) for part in self.reversed_path(branch, tokens)][::-1]

    def reversed_path(self, branch: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        """The segments of a prompt as (branch, start, end), last token first."""
        end = tokens
        while branch != ROOT:
            start = self.starts[branch]
            if start < end:
                yield branch, start, end
                end = start
            branch = self.parents[branch]

    def shared(self, one: int, other: int, tokens: int) -> int:
        """Length of the common prefix of two branches, up to `tokens` tokens."""
        shared = 0
        pairs = zip(self.path(one, tokens), self.path(other, tokens), strict=False)
        for left, right in pairs:
            if left.branch != right.branch:
                break
            shared = min(left.end, right.end)
        return shared

    def blocks(self, branch: int, tokens: int, size: int) -> NDArray[np.uint64]:
        """Content hashes of a prompt's full blocks of `size` tokens, first block first.

        A hash covers its block and all blocks before it, so it serves as a local hash and, in a
        plain prefix cache, as a sequence hash. Equal trees have equal hashes on every machine.
        """
        path = self.path(branch, tokens)
        if not path:
            return np.empty(0, np.uint64)
        ends = [segment.end // size for segment in path]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        seeds = np.repeat(np.array([_seed(s.branch) for s in path], np.uint64), counts)
        seeds += np.arange(1, ends[-1] + 1, dtype=np.uint64) * np.uint64(size * _STEP & _MASK)
        return _finalise(seeds)


def mix(branch: int, position: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A 64-bit hash of each (branch, position), by SplitMix64's finaliser (Steele et al. 2014)."""
    return _finalise(position.astype(np.uint64) * np.uint64(_STEP) + np.uint64(_seed(branch)))


def _seed(branch: int) -> int:
    return (branch + 1) * 0x9E3779B97F4A7C15 & _MASK


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x
