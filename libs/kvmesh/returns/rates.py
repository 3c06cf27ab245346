"""Rates of return by age: how often a prompt is read again, given the time since its last use.

A rate is a hazard: the expected number of returns per second at an age, of prompts that have not
returned before that age. A forecast is one rate for each of `BINS` bins of age, whose widths
double. On the wire each rate is one byte, its logarithm in eighths of an octave.
"""

from math import inf

from kvmesh._native import age_bin, pack_rates, share_returned, share_within

__all__ = [
    "AGE_ENDS",
    "BINS",
    "age_bin",
    "pack_rates",
    "share_returned",
    "share_within",
    "unpack_rates",
]

BINS = 16
FIRST_BIN_S = 0.5
# the upper ends of the bins, in seconds: 0.5, 1, 2, … 8192, inf
AGE_ENDS = (*(FIRST_BIN_S * 2.0**k for k in range(BINS - 1)), inf)
_PER_OCTAVE = 8
_ONE_PER_SECOND = 192  # the byte of the rate 1/s


def unpack_rates(packed: bytes) -> tuple[float, ...]:
    """The rates that `pack_rates` packed; ValueError if there are not `BINS` of them."""
    if len(packed) != BINS:
        raise ValueError(f"{len(packed)} rates of return instead of {BINS}")
    return tuple(_RATES[byte] for byte in packed)


_RATES = (0.0, *(2.0 ** ((byte - _ONE_PER_SECOND) / _PER_OCTAVE) for byte in range(1, 256)))
