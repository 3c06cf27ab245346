"""Learned returns of a class of prompts, in shares and times. Pure."""

from collections.abc import Iterable, Sequence
from math import exp, inf, log

from kvmesh.bus.messages import ReturnClass
from kvmesh.returns.rates import AGE_ENDS


def share_returned(rates: Sequence[float], within_s: float) -> float:
    """The share of prompts that return within this age, by rates per second of the bins of age."""
    return 1 - exp(-_expected(rates, within_s))


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


def _expected(rates: Sequence[float], within_s: float) -> float:
    """The expected number of returns up to an age, of a prompt that returns at these rates."""
    total = start = 0.0
    for rate, end in zip(rates, AGE_ENDS, strict=True):
        if rate:
            total += rate * max(min(within_s, end) - start, 0.0)
        start = end
    return total
