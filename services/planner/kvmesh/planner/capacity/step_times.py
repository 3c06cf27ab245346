"""Step times of a kind of worker, learned from the load reports of its ranks.

A report counts steps, computed prompt tokens and busy time since the start of its rank. Two
reports that follow each other give one sample; the step times are the non-negative least squares
fit over the samples of all ranks. Dynamo's planner rejects a fit with a negative coefficient and
then has none; here the coefficient that the samples do not support is left out instead.
"""

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvmesh.bus.messages import Load

SAMPLES_PER_CELL = 32
CELLS = 6  # along each of the two dimensions, prefill and KV
MIN_SAMPLES = 12
FEATURES = 4  # steps that decode, steps with prefill, prompt tokens, KV tokens of each step
SHORTEST_S = 1e-4
REFIT_AFTER = 16


class FittedStepTimes:
    """Linear step times in seconds: per decode, per step with prefill, per token, per KV token."""

    def __init__(self, step: float, prefill_step: float, token: float, kv_token: float) -> None:
        self.step = step
        self.prefill_step = prefill_step
        self.token = token
        self.kv_token = kv_token

    def prefill(self, tokens: int) -> float:
        return max(self.prefill_step + self.token * tokens, SHORTEST_S) if tokens else 0.0

    def decode(self, sequences: int, tokens: float) -> float:
        return max(self.step + self.kv_token * tokens, SHORTEST_S) if sequences else 0.0


class StepSample(NamedTuple):
    """The steps of a rank between two reports.

    Steps that decode, steps with prefill, computed prompt tokens, KV tokens times decodes, seconds,
    and the mean number of decoding sequences.
    """

    decodes: float
    prefills: float
    tokens: float
    decoded_kv: float
    seconds: float
    sequences: float


class StepTimesFit:
    """Collects samples of one kind of worker and fits its step times.

    The samples of each cell of a grid over prefill and KV are bounded, so that hours of one load
    do not outnumber the minutes of another. `cells` is the number along each dimension.
    """

    def __init__(
        self, block_size: int, step_tokens: int, kv_tokens: int, cells: int = CELLS
    ) -> None:
        self._side = cells
        self._block_size = block_size
        self._step_tokens = max(step_tokens, 1)
        self._kv_tokens = max(kv_tokens, 1)
        self._last: dict[tuple[str, int], Load] = {}
        self._cells: dict[tuple[int, int], deque[StepSample]] = {}
        self._fitted: FittedStepTimes | None = None
        self._unfitted = 0

        self.added = 0

    @property
    def cells(self) -> list[list[StepSample]]:
        """The samples of each occupied cell of the grid."""
        return [list(cell) for cell in self._cells.values()]

    @property
    def samples(self) -> int:
        return sum(len(cell) for cell in self._cells.values())

    def left(self, instance: str) -> None:
        for key in [key for key in self._last if key[0] == instance]:
            del self._last[key]

    def add(self, load: Load) -> None:
        """Add a report; one of a rank that does not report its busy time is ignored."""
        key = load.instance, load.rank
        before = self._last.setdefault(key, load)
        self._last[key] = load
        if load.steps == before.steps:
            # steps and busy time may be read less often than tokens are counted
            self._last[key] = replace(load, computed_tokens=before.computed_tokens)
            return
        steps, seconds = load.steps - before.steps, load.busy_s - before.busy_s
        tokens = load.computed_tokens - before.computed_tokens
        if tokens < 0 or steps <= 0 or not 0 < seconds < inf:
            return
        decodes, prefills, kv = self._batches(before, load, steps, tokens)
        sequences = (load.decoding + before.decoding or load.running + before.running) / 2
        sample = StepSample(decodes, prefills, tokens, kv * decodes, seconds, max(sequences, 1.0))
        share = min(tokens / steps / self._step_tokens, 1.0)
        # steps without prefill are the most: they must not push out those with a little of it
        band = 1 + min(int(share * (self._side - 1)), self._side - 2) if tokens else 0
        cell = band, min(int(kv / self._kv_tokens * self._side), self._side - 1)
        self._cells.setdefault(cell, deque(maxlen=SAMPLES_PER_CELL)).append(sample)
        self._unfitted += 1
        self.added += 1

    def _batches(self, before: Load, load: Load, steps: int, tokens: int) -> tuple[int, int, float]:
        """The steps between two reports that decode, those that prefill, and the decoded KV tokens.

        An engine that does not report its prefill steps fills each up; one that does not report the
        KV of its decoding sequences has all its active blocks in them.
        """
        prefills = load.prefill_steps - before.prefill_steps
        if not load.prefill_steps or prefills < 0:
            prefills = ceil(tokens / self._step_tokens)
        prefills = min(prefills, steps)
        if load.decoding or before.decoding:
            return steps, prefills, (load.decode_tokens + before.decode_tokens) / 2
        if load.prefill_steps:  # such an engine reports its decoding sequences too: there are none
            return steps - prefills, prefills, 0.0
        return steps, prefills, (load.active_blocks + before.active_blocks) / 2 * self._block_size

    def fitted(self) -> FittedStepTimes | None:
        """The step times; None until MIN_SAMPLES samples, of which some have prefill, are seen."""
        if self._unfitted >= REFIT_AFTER or self._fitted is None:
            self._unfitted = 0
            samples = [sample for cell in self._cells.values() for sample in cell]
            self._fitted = fit_step_times(samples) or self._fitted
        return self._fitted


def fit_step_times(samples: Sequence[StepSample]) -> FittedStepTimes | None:
    """The linear step times; None for fewer than MIN_SAMPLES or samples without prefill."""
    rows = np.array(samples, dtype=np.float64)
    if len(rows) < MIN_SAMPLES or not rows[:, 2].any():
        return None
    # errors grow with the time that a sample covers
    weights = 1.0 / np.maximum(rows[:, FEATURES], 1e-3)
    features = rows[:, :FEATURES] * weights[:, None]
    return FittedStepTimes(*_non_negative(features, rows[:, FEATURES] * weights))


def _non_negative(features: NDArray[np.float64], times: NDArray[np.float64]) -> list[float]:
    """Non-negative least squares with a touch of ridge, by trying every subset of the features."""
    scale = np.sqrt((features**2).mean(0))
    scale[scale == 0] = 1.0
    scaled = features / scale
    gram = scaled.T @ scaled + 1e-6 * len(times) * np.eye(FEATURES)
    moment = scaled.T @ times
    best, least = np.zeros(FEATURES), np.inf
    for size in range(1, FEATURES + 1):
        for chosen in map(list, combinations(range(FEATURES), size)):
            solution = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            if (solution < 0).any():
                continue
            full = np.zeros(FEATURES)
            full[chosen] = solution
            error = float(full @ gram @ full - 2 * moment @ full)
            if error < least:
                best, least = full, error
    return [float(value) for value in best / scale]
