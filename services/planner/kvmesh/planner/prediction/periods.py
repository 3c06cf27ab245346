"""The period of a series, from its autocorrelation."""

from typing import NamedTuple

import numpy as np

from kvmesh.planner.prediction.calibration import Forecast

SHORTEST = 4
# A peak counts if it exceeds this, the dip before it by as much, and chance: so many standard
# deviations of white noise at its lag.
LEAST = 0.3
DEVIATIONS = 4.0
# Multiples of a period correlate as it does: the shortest lag near the best one is the period.
NEAR = 0.9


class Period(NamedTuple):
    """A period in intervals, and the autocorrelation at that lag."""

    length: int
    strength: float


def find_period(values: Forecast) -> Period | None:
    """The period that a series of at least two of them shows; None if there is none.

    Computed on roots of the values, which single bursts dominate less, without a linear trend.
    """
    count = len(values)
    if count < 2 * SHORTEST:
        return None
    correlation = _autocorrelation(_detrended(np.sqrt(values)))
    if correlation is None:
        return None
    # A slow series correlates at all short lags: a peak must rise from a dip before it.
    risen = correlation - np.minimum.accumulate(correlation) >= LEAST
    risen[:SHORTEST] = False
    peaks = np.where(risen, correlation, 0.0)
    best = float(peaks.max())
    if best < LEAST:
        return None
    near = int(np.flatnonzero(peaks >= NEAR * best)[0])
    reach = max(1, near // 8)
    length = near + int(correlation[near : near + reach + 1].argmax())
    strength = float(correlation[length])
    if strength < max(LEAST, DEVIATIONS / (count - length) ** 0.5):
        return None
    return Period(length, min(strength, 1.0))


def _detrended(values: Forecast) -> Forecast:
    time = np.arange(len(values)) - (len(values) - 1) / 2
    centred: Forecast = values - values.mean()
    detrended: Forecast = centred - time * float(time @ centred) / float(time @ time)
    return detrended


def _autocorrelation(values: Forecast) -> Forecast | None:
    """At lags 0 to half the length; None for a constant series."""
    count = len(values)
    variance = float(values @ values) / count
    if variance <= 1e-12:
        return None
    spectrum = np.fft.rfft(values, 1 << (2 * count - 1).bit_length())
    products = np.fft.irfft(spectrum * np.conj(spectrum))[: count // 2 + 1]
    correlation: Forecast = products / (variance * (count - np.arange(len(products))))
    return correlation
