"""Chooses a part of a workload's families with the prefix sharing of all of them."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvmesh.workload.analysis.sharing import InfiniteCache
from kvmesh.workload.model import Workload

DRAWS = 24
PARTS = 16  # groups of families that are chosen together have at most this part of the requests


class FamilySelection:
    """Families in groups that share more with each other than with the rest.

    `uses` are those of `branch_uses`. Families that share a prefix with the fewest others come
    into one group first, up to a number of requests.
    """

    def __init__(
        self,
        workload: Workload,
        families: list[list[int]],
        uses: dict[int, list[tuple[int, int]]],
    ) -> None:
        self._workload = workload
        self._families = families
        ties = {
            (min(one, other), max(one, other), sharers)
            for each in uses.values()
            for sharers, ((_, one), (_, other)) in enumerate(pairwise(each), 2)
        }
        self._ties = sorted(ties, key=lambda tie: (tie[2], tie))
        self._hits, self._tokens = self._ideal(range(len(families)))

    def choose(self, requests: int, rng: np.random.Generator) -> list[int]:
        """Numbers of families with at least so many requests, or all of them.

        Of several draws, it is the one whose ideal share, prompt tokens per request and number of
        requests are nearest to those asked for.
        """
        groups = self._groups(requests)
        sizes = np.array([sum(len(self._families[n]) for n in group) for group in groups])
        total = int(sizes.sum())
        if requests >= total:
            return list(range(len(self._families)))
        best: list[int] = []
        least = float("inf")
        for _ in range(DRAWS):
            chosen = self._draw(groups, sizes, requests, rng)
            count = sum(len(self._families[n]) for n in chosen)
            hits, tokens = self._ideal(chosen)
            share, mean = self._hits / self._tokens, self._tokens / total
            unlike = (
                abs(hits / tokens - share) / max(share, 1e-3)
                + abs(tokens / count - mean) / mean
                + 2 * (count / requests - 1)
            )
            if unlike < least:
                best, least = chosen, unlike
        return best

    def _draw(
        self,
        groups: list[list[int]],
        sizes: NDArray[np.int64],
        requests: int,
        rng: np.random.Generator,
    ) -> list[int]:
        """Groups of all sizes: evenly spaced ones in the order of their sizes, then some more."""
        order = np.lexsort((rng.random(len(groups)), sizes))
        step = sizes.sum() / requests
        spaced = (np.arange(0, len(groups), step) + rng.random() * step).astype(np.int64)
        taken = [int(order[at]) for at in spaced if at < len(groups)]
        left = rng.permutation(np.setdiff1d(order, taken)).tolist()
        missing = requests - int(sizes[taken].sum())
        while missing > 0:
            fitting = next((g for g in left if sizes[g] <= missing), None)
            more = min(left, key=lambda g: int(sizes[g])) if fitting is None else fitting
            left.remove(more)
            taken.append(more)
            missing -= int(sizes[more])
        for group in sorted(taken, key=lambda g: -int(sizes[g])):
            if missing + sizes[group] <= 0:
                taken.remove(group)
                missing += int(sizes[group])
        return sorted(n for group in taken for n in groups[group])

    def _groups(self, requests: int) -> list[list[int]]:
        """The families of each group; a group has few of the requests that are to be chosen."""
        root = list(range(len(self._families)))
        sizes = [len(family) for family in self._families]

        def find(number: int) -> int:
            while root[number] != number:
                root[number] = root[root[number]]
                number = root[number]
            return number

        for one, other, _ in self._ties:
            first, second = find(one), find(other)
            if first != second and sizes[first] + sizes[second] <= requests / PARTS:
                root[second] = first
                sizes[first] += sizes[second]
        groups: dict[int, list[int]] = {}
        for number in range(len(root)):
            groups.setdefault(find(number), []).append(number)
        return list(groups.values())

    def _ideal(self, chosen: Iterable[int]) -> tuple[int, int]:
        """(tokens that an infinite cache would hold, prompt tokens) of some families."""
        workload = self._workload
        cache = InfiniteCache(workload.tree, workload.block_size)
        hits = tokens = 0
        for index in sorted(index for number in chosen for index in self._families[number]):
            round_ = workload.rounds[index]
            hits += cache.add(round_.branch, round_.input_tokens)
            cache.add(round_.output_branch, round_.input_tokens + round_.output_tokens)
            tokens += round_.input_tokens
        return hits, tokens
