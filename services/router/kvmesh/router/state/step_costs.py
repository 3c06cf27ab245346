"""One model of step times for all ranks, and by how much each rank takes longer (ADR 24, 50)."""

import math
from functools import lru_cache

import numpy as np

from kvmesh.router.state.arrays import Floats, Slots

RECENT_WINDOWS = 4.0  # over which the weight of a window in a rank's slowness halves
KEPT = 0.98  # weight of the evidence for the costs after the next comparison
HELD = 0.9  # power of a slowness in later evidence: what different loads explain, they take over
SETTLED_WINDOWS = 6  # of each rank, before which all comparisons count as the first
ALIKE = 1.35  # times as slow, up to which ranks count as equal
UNLIKE = 1.8  # from which on slowness counts in full
REOPENED = 0.1  # share of the first guess in the start of each fit, so that no cost stays at 0
_KINDS = 6  # of work
_ROUNDS = 2  # of the first comparison
_STEPS = 40
_TINY = 1e-12
_LEAST = np.array(_TINY)  # as an array, which NumPy compares faster


# Columns of an array of windows, each of which is a short time of one rank: its end; its steps,
# prompt tokens computed, tokens generated, steps that computed prompt tokens, and steps weighted by
# the share of KV memory in use, and by its square root: step times rise more slowly than that share
# on some engines; and the seconds in its steps.
END, WORK, BUSY = 0, slice(1, 1 + _KINDS), 1 + _KINDS
COLUMNS = 2 + _KINDS


class StepCosts:
    """`seconds` for a unit of each kind of work on the median rank; zeros before a comparison.

    The costs move slowly and the slowness of ranks at once: so a rank that has become slow is not
    mistaken for a kind of work that takes longer, nor one whose load has changed for a slow one.
    Slowness within the error of the costs is left to them.
    """

    def __init__(self) -> None:
        self.seconds: Floats = np.zeros(_KINDS)
        self._gram = np.zeros((_KINDS, _KINDS))
        self._goal = np.zeros(_KINDS)
        self._until = -np.inf
        self._young = True

    def compare(self, windows: Floats, counts: Slots) -> list[float]:
        """The slowness of ranks relative to the median one, and learn from their latest windows.

        `windows` are those of the ranks one after the other, each in the order of time, and
        `counts` their numbers, at least one of each rank.
        """
        rows, busy_s = windows[:, WORK].copy(), windows[:, BUSY].copy()
        latest = windows[:, END] > self._until
        slowness = np.ones(len(counts))
        if self._young:
            self._young = int(counts.min()) < SETTLED_WINDOWS
            for _ in range(_ROUNDS):
                self._fit(rows, busy_s, np.repeat(slowness, counts), kept=0.0)
                slowness = self._slowness(rows, busy_s, counts)
        else:
            slowness = self._slowness(rows, busy_s, counts)
            if latest.any():
                scale = np.repeat(counted(slowness) ** HELD, counts)[latest]
                self._fit(rows[latest], busy_s[latest], scale, kept=KEPT)
        self._until = float(windows[:, END].max())
        found: list[float] = slowness.tolist()
        return found

    def _slowness(self, rows: Floats, busy_s: Floats, counts: Slots) -> Floats:
        ratios = busy_s / np.maximum(rows @ self.seconds, _TINY)
        medians, firsts = np.empty(len(counts)), counts.cumsum() - counts
        for count in set(counts.tolist()):  # of ranks with equally many windows at once
            ranks = (counts == count).nonzero()[0]
            medians[ranks] = _recent_medians(ratios[firsts[ranks, None] + np.arange(count)])
        relative: Floats = medians / np.sort(medians)[(len(medians) - 1) // 2]
        return relative

    def _fit(self, rows: Floats, busy_s: Floats, slowness: Floats, kept: float) -> None:
        """Non-negative costs with relative errors of the windows as small as possible.

        By multiplicative updates, whose early end keeps costs of similar kinds of work similar.
        """
        relative = rows * (slowness / busy_s)[:, None]
        self._gram = kept * self._gram + relative.T @ relative
        self._goal = kept * self._goal + relative.sum(0)
        guess = self._goal / np.maximum(self._gram.sum(1), _TINY)
        costs = (REOPENED * guess + (1 - REOPENED) * self.seconds) if kept else guess
        explained = np.empty(_KINDS)
        for _ in range(_STEPS):
            np.dot(self._gram, costs, out=explained)
            np.maximum(explained, _LEAST, out=explained)
            costs *= self._goal
            costs /= explained
        self.seconds = costs


def counted(slowness: Floats) -> Floats:
    """The part of each slowness that exceeds the error of the costs: between 1 and the slowness."""
    logs = np.log(slowness)
    low, high = math.log(ALIKE), math.log(UNLIKE)
    found: Floats = np.exp(logs * np.clip((np.abs(logs) - low) / (high - low), 0.0, 1.0))
    return found


def _recent_medians(values: Floats) -> Floats:
    """The median of each row of values in the order of time, of which later ones weigh more."""
    order = values.argsort(1)
    below = _weights(values.shape[1])[order].cumsum(1)
    at = (below < below[:, -1:] / 2).sum(1, keepdims=True)
    medians: Floats = np.take_along_axis(values, np.take_along_axis(order, at, 1), 1)[:, 0]
    return medians


@lru_cache(maxsize=64)
def _weights(count: int) -> Floats:
    weights: Floats = np.exp2((np.arange(count) - count) / RECENT_WINDOWS)
    return weights
