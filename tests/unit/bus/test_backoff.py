"""Delays between attempts grow up to a limit, are random, and start again after a reset."""

import random

from kvmesh.bus.backoff import Backoff


def test_ceilings_double_up_to_the_limit_and_restart() -> None:
    ceilings: list[float] = []

    def highest(low: float, high: float) -> float:
        ceilings.append(high)
        return high

    backoff = Backoff(0.5, 30.0, highest)
    delays = [backoff.delay() for _ in range(8)]
    backoff.reset()
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.delay() == 0.5
    assert ceilings == [*delays, 0.5]


def test_delays_are_spread_over_the_whole_range() -> None:
    rng = random.Random(1)
    firsts = [Backoff(1.0, 30.0, rng.uniform).delay() for _ in range(1000)]
    assert min(firsts) < 0.05
    assert max(firsts) > 0.95
