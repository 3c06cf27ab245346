"""Learned returns of a class of prompts. Pure."""

from collections.abc import Iterable, Sequence
from math import inf, log

from kvmesh.bus.messages import ReturnClass
from kvmesh.returns.rates import AGE_ENDS


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
