"""Learned and expected returns of prompts, in shares and times. Pure."""

from collections.abc import Iterable, Sequence
from math import inf, log

from kvmesh.bus.messages import ExpectedReturn, ReturnClass
from kvmesh.returns.rates import AGE_ENDS, unpack_rates

WITHIN = {"10 s": 10.0, "1 min": 60.0, "10 min": 600.0}


def median_s(rates: Sequence[float]) -> float:
    """The age in seconds by which half of the prompts have returned; infinite if fewer do."""
    left, start = log(2), 0.0
    for rate, end in zip(rates, AGE_ENDS, strict=True):
        if rate * (end - start) >= left:
            return start + left / rate
        left -= rate * (end - start) if rate else 0.0
        start = end
    return inf


def finest_class(classes: Iterable[ReturnClass], waits: Sequence[str]) -> ReturnClass | None:
    """The finest of the classes to which a wait belongs, named as in `Outcome.waits_for`."""
    given = list(waits)
    found = [each for each in classes if each.waits == given[: len(each.waits)]]
    return max(found, key=lambda each: len(each.waits), default=None)


def expected_rates(expected: ExpectedReturn) -> tuple[float, ...] | None:
    """The rates that were expected; None if they are of another version."""
    try:
        return unpack_rates(expected.rates)
    except ValueError:
        return None
