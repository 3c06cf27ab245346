"""Rates of return by age: how often a prompt is read again, given the time since its last use.

A rate is a hazard: the expected number of returns per second at an age, of prompts that have not
returned before that age. A forecast is one rate for each of `BINS` bins of age, whose widths
double. On the wire each rate is one byte, its logarithm in eighths of an octave.
"""

from collections.abc import Sequence
from math import exp, expm1, inf, log2

BINS = 16
FIRST_BIN_S = 0.5
# the upper ends of the bins, in seconds: 0.5, 1, 2, … 8192, inf
AGE_ENDS = (*(FIRST_BIN_S * 2.0**k for k in range(BINS - 1)), inf)
_PER_OCTAVE = 8
_ONE_PER_SECOND = 192  # the byte of the rate 1/s


def age_bin(age_s: float) -> int:
    """The bin of an age in seconds; a negative age counts as 0."""
    if age_s < FIRST_BIN_S:
        return 0
    if age_s >= AGE_ENDS[BINS - 2]:
        return BINS - 1
    return int(log2(age_s / FIRST_BIN_S)) + 1


def share_returned(rates: Sequence[float], within_s: float) -> float:
    """The share of prompts that return within this age, by rates per second of the bins of age."""
    expected = start = 0.0
    for rate, end in zip(rates, AGE_ENDS, strict=True):
        if rate and within_s > start:
            expected += rate * (min(within_s, end) - start)
        start = end
    return 1.0 - exp(-expected)


def share_within(rates: Sequence[float], age_s: float, seconds: float) -> float:
    """The share that returns within so many seconds, of the prompts that wait at an age."""
    expected, at, until = 0.0, max(age_s, 0.0), max(age_s, 0.0) + seconds
    for bin_ in range(age_bin(at), BINS):
        end = min(AGE_ENDS[bin_], until)
        expected += rates[bin_] * (end - at)
        if end >= until:
            break
        at = end
    return -expm1(-expected)


def pack_rates(rates: Sequence[float]) -> bytes:
    """Rates per second, one for each bin, as `BINS` bytes; each is off by at most 4.5 %."""
    return bytes(_packed(rate) for rate in rates)


def unpack_rates(packed: bytes) -> tuple[float, ...]:
    """The rates that `pack_rates` packed; ValueError if there are not `BINS` of them."""
    if len(packed) != BINS:
        raise ValueError(f"{len(packed)} rates of return instead of {BINS}")
    return tuple(_RATES[byte] for byte in packed)


def _packed(rate: float) -> int:
    if rate <= 0:
        return 0
    return min(max(round(_ONE_PER_SECOND + _PER_OCTAVE * log2(rate)), 0), 255)


_RATES = (0.0, *(2.0 ** ((byte - _ONE_PER_SECOND) / _PER_OCTAVE) for byte in range(1, 256)))
