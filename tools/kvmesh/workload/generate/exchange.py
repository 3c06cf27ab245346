"""Exchanges values among similar ones, so that their distribution stays as it is."""

import numpy as np
from numpy.typing import NDArray

GROUP = 16
SPREAD = 1.25


class ExchangeGroups:
    """Groups of items of one key: at most GROUP, the largest value at most SPREAD times the least.

    Items with a negative key keep their values.
    """

    def __init__(self, keys: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._order = np.lexsort((values, keys))
        self._groups = np.array(
            _group_numbers(keys[self._order].tolist(), values[self._order].tolist()), np.int64
        )

    def givers(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """For each item, the one whose value it takes; each gives its value once."""
        drawn = np.lexsort((rng.random(len(self._groups)), self._groups))
        givers = np.empty(len(self._groups), np.int64)
        givers[self._order] = self._order[drawn]
        return givers


def _group_numbers(keys: list[int], values: list[float]) -> list[int]:
    groups: list[int] = []
    number = begin = 0
    for at, (key, value) in enumerate(zip(keys, values, strict=True)):
        apart = key < 0 or key != keys[begin] or value > SPREAD * values[begin]
        if apart or at - begin >= GROUP:
            number, begin = number + 1, at
        groups.append(number)
    return groups
