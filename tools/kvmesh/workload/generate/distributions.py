"""Distributions defined by published quantiles."""

import math
import random
from bisect import bisect
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.workload.model import LIMIT

_NORMAL = NormalDist()
_MEDIAN, _P90, _P99 = (_NORMAL.inv_cdf(share) for share in (0.5, 0.9, 0.99))
Positive = Annotated[float, Meta(gt=0, le=LIMIT)]
Natural = Annotated[float, Meta(ge=0, le=LIMIT)]


class Quantiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A positive quantity with the given median and, optionally, 90th and 99th percentile.

    It is piecewise log-normal: its logarithm is linear in the normal quantile between and beyond
    these points, so it meets every published point of a heavy tail.
    """

    p50: Positive
    p90: Positive | None = None
    p99: Positive | None = None
    min: Natural = 0.0
    max: Natural = float(LIMIT)

    def __post_init__(self) -> None:
        points = [p for p in (self.p50, self.p90, self.p99) if p is not None]
        if points != sorted(points):
            raise ValueError("percentiles must not decrease")
        if self.p99 is not None and self.p90 is None:
            raise ValueError("p99 requires p90")
        if self.min > self.max:
            raise ValueError("min is above max")

    def sample(self, rng: random.Random) -> float:
        """One value, within `min` and `max`."""
        value = self.p50 if self.p90 is None else self.at(rng.random())
        return min(max(value, self.min), self.max)

    def at(self, share: float) -> float:
        """The quantile of `share` (0 to 1, exclusive), before `min` and `max` apply."""
        knots = [(_MEDIAN, self.p50), (_P90, self.p90 or self.p50)]
        if self.p99 is not None:
            knots.append((_P99, self.p99))
        z = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
        index = min(max(bisect([knot for knot, _ in knots], z), 1), len(knots) - 1)
        (z0, v0), (z1, v1) = knots[index - 1], knots[index]
        slope = (math.log(v1) - math.log(v0)) / (z1 - z0)
        return math.exp(min(math.log(v0) + slope * (z - z0), 700.0))


Amount = Natural | Quantiles


def draw(amount: Amount, rng: random.Random) -> float:
    """A constant itself, or a sample of a distribution."""
    return amount.sample(rng) if isinstance(amount, Quantiles) else amount


def draw_int(amount: Amount, rng: random.Random, least: int = 0) -> int:
    """The drawn value rounded, at least `least`."""
    return max(least, round(draw(amount, rng)))
