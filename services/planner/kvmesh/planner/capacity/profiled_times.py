"""Step times of a pool: a profile, corrected by samples, or the fit to the samples.

A profile has the right shape and perhaps the wrong scale; a fit has the right scale where samples
are, and extrapolates badly from few or collinear ones. The better of both predicts the samples of
a cell of the grid better from those of the other cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

import numpy as np

from kvmesh.planner.capacity.queueing import StepTimes
from kvmesh.planner.capacity.step_times import (
    REFIT_AFTER,
    StepSample,
    StepTimesFit,
    fit_step_times,
)
from kvmesh.step_times.profile import StepProfile

FEWEST = 3  # samples that correct a profile
PULL = 5.0  # samples that the common factor stands for against those of prefill and decode
MOST_FACTOR = 10.0
TimesSource = Literal["none", "profile", "fit"]


class ScaledProfile:
    """The step times of a profile, with a factor each for prefill and decode."""

    def __init__(self, profile: StepProfile, prefill: float = 1.0, decode: float = 1.0) -> None:
        self.profile = profile
        self.prefill_factor = prefill
        self.decode_factor = decode

    def prefill(self, tokens: int) -> float:
        return self.prefill_factor * self.profile.prefill(tokens)

    def decode(self, sequences: int, tokens: float) -> float:
        if not sequences:
            return 0.0
        return self.decode_factor * self.profile.decode_seconds(sequences, tokens)


@dataclass(frozen=True)
class KnownTimes:
    """Step times, and the model that they come from.

    `factor` is that of a profile: the seconds that steps take over those that it has.
    """

    times: StepTimes
    source: TimesSource
    factor: float = 1.0


class ProfiledTimes:
    """Chooses between a profile and a fit, and keeps the choice until enough samples are new."""

    def __init__(self) -> None:
        self._known: KnownTimes | None = None
        self._of: tuple[StepProfile, StepTimesFit | None] | None = None
        self._added = 0

    def known(self, profile: StepProfile, fit: StepTimesFit | None) -> KnownTimes:
        """The step times by both, as of now."""
        added = fit.added if fit is not None else 0
        if self._of != (profile, fit) or self._known is None or added - self._added >= self._every:
            self._known = choose_times(profile, fit)
            self._of, self._added = (profile, fit), added
        return self._known

    @property
    def _every(self) -> int:
        return FEWEST if self._added < REFIT_AFTER else REFIT_AFTER


def choose_times(profile: StepProfile, fit: StepTimesFit | None) -> KnownTimes:
    """The corrected profile, or the fit if it predicts left-out cells better."""
    cells = fit.cells if fit is not None else []
    parts = [[_parts(ScaledProfile(profile), sample) for sample in cell] for cell in cells]
    scaled = _scaled(profile, cells, parts)
    fitted = fit.fitted() if fit is not None else None
    if fitted is not None and _fit_error(cells) < _profile_error(profile, cells, parts):
        return KnownTimes(fitted, "fit")
    return KnownTimes(scaled, "profile", _factor(cells, parts))


def _parts(times: StepTimes, sample: StepSample) -> tuple[float, float]:
    """Seconds of prefill and of decode that the times give to a sample."""
    prefill = decode = 0.0
    if sample.prefills:
        prefill = sample.prefills * times.prefill(round(sample.tokens / sample.prefills))
    if sample.decodes:
        sequences, tokens = max(round(sample.sequences), 1), sample.decoded_kv / sample.decodes
        decode = sample.decodes * times.decode(sequences, tokens)
    return prefill, decode


def predicted_seconds(times: StepTimes, sample: StepSample) -> float:
    """Seconds that the times give to a sample."""
    return sum(_parts(times, sample))


Cells = Sequence[Sequence[StepSample]]
Parts = Sequence[Sequence[tuple[float, float]]]


def _factor(cells: Cells, parts: Parts) -> float:
    """The median over the cells of their median ratio; 1 for fewer than FEWEST samples."""
    ratios = [
        [sample.seconds / max(sum(both), 1e-9) for sample, both in zip(cell, part, strict=True)]
        for cell, part in zip(cells, parts, strict=True)
    ]
    if sum(map(len, ratios)) < FEWEST:
        return 1.0
    factor = median(median(cell) for cell in ratios if cell)
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)


def _scaled(profile: StepProfile, cells: Cells, parts: Parts) -> ScaledProfile:
    """The profile with the factors that fit the samples; where those do not tell, the median's."""
    factor = _factor(cells, parts)
    rows = [
        (prefill / sample.seconds, decode / sample.seconds)
        for cell, part in zip(cells, parts, strict=True)
        for sample, (prefill, decode) in zip(cell, part, strict=True)
    ]
    if len(rows) < FEWEST:
        return ScaledProfile(profile)
    features = np.array(rows)
    gram = features.T @ features + PULL * np.eye(2)
    moment = features.sum(0) + PULL * factor * np.ones(2)
    prefill, decode = np.clip(np.linalg.solve(gram, moment), factor / 3, factor * 3)
    return ScaledProfile(profile, float(prefill), float(decode))


def _profile_error(profile: StepProfile, cells: Cells, parts: Parts) -> float:
    """Mean over the cells of the median relative error of the profile corrected by the others."""
    errors = []
    for left in range(len(cells)):
        others = [n for n in range(len(cells)) if n != left]
        times = _scaled(profile, [cells[n] for n in others], [parts[n] for n in others])
        errors.append(
            median(
                abs(times.prefill_factor * prefill + times.decode_factor * decode - sample.seconds)
                / sample.seconds
                for sample, (prefill, decode) in zip(cells[left], parts[left], strict=True)
            )
        )
    return sum(errors) / len(errors)


def _fit_error(cells: Cells) -> float:
    """The same of the fit to the samples of the others; infinite if one of them has none."""
    errors = []
    for left in range(len(cells)):
        times = fit_step_times([s for n, cell in enumerate(cells) if n != left for s in cell])
        if times is None:
            return inf
        errors.append(relative_error(times, cells[left]))
    return sum(errors) / len(errors)


def relative_error(times: StepTimes, samples: Sequence[StepSample]) -> float:
    """The median relative error of the times over samples."""
    return median(abs(predicted_seconds(times, s) - s.seconds) / s.seconds for s in samples)
