"""Loads of blocks that an engine overlaps with computing the rest of the same prompt (ADR 51)."""

SLOWEST = 8.0  # of the time to load a block over that to compute it: a load saves a ninth


def relative_time(alone: float) -> float:
    """The time to get a block over the time to compute it, if a load alone takes `alone` times it.

    An engine loads alone what loads twice as fast; else it loads and computes at once.
    """
    return max(min(alone, 0.5), alone / (1.0 + alone))
