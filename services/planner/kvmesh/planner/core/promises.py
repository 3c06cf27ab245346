"""Promises about latencies: parsing, and the requests to which each applies."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite

from kvmesh.planner.errors import PlannerConfigError

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_PROMISE = re.compile(
    r"(?:(?P<model>[^:=]+)/)?(?:(?P<cls>[^/:=]+):)?p(?P<quantile>\d+(?:\.\d+)?)"
    r"=(?P<time>\d+(?:\.\d+)?)(?P<unit>ms|s|m)",
    re.ASCII,
)


@dataclass(frozen=True)
class Promise:
    """`quantile` of the requests of a model and class have `metric` at most `seconds`.

    `metric` is "ttft", "itl" or "queue"; an empty model or class means every one.
    """

    metric: str
    quantile: float
    seconds: float
    model: str = ""
    request_class: str = ""

    def __str__(self) -> str:
        percent = f"p{self.quantile * 100:g}={self.seconds:g}s"
        return f"{self.metric} {self.request_class + ':' if self.request_class else ''}{percent}"


def parse_promises(metric: str, texts: list[str]) -> list[Promise]:
    """Promises from `[MODEL/][CLASS:]pQQ=TIME`; raises PlannerConfigError."""
    promises: list[Promise] = []
    for text in texts:
        match = _PROMISE.fullmatch(text)
        if match is None:
            raise PlannerConfigError(
                f"{metric} {text!r}: expected [MODEL/][CLASS:]QUANTILE=TIME, such as p95=2s or"
                " batch:p90=500ms"
            )
        quantile = float(match["quantile"]) / 100
        seconds = float(match["time"]) * UNITS[match["unit"]]
        if not 0 < quantile < 1:
            raise PlannerConfigError(f"{metric} {text}: a quantile lies between p0 and p100")
        if not seconds or not isfinite(seconds):
            raise PlannerConfigError(f"{metric} {text}: the time must be above 0")
        promise = Promise(metric, quantile, seconds, match["model"] or "", match["cls"] or "")
        _check_conflict(promise, promises)
        promises.append(promise)
    return promises


def _check_conflict(new: Promise, promises: list[Promise]) -> None:
    """A higher quantile may not be promised a shorter time."""
    for old in promises:
        if (old.model, old.request_class) != (new.model, new.request_class):
            continue
        low, high = sorted((old, new), key=lambda promise: promise.quantile)
        if low.quantile == high.quantile and low.seconds != high.seconds:
            raise PlannerConfigError(f"{low} and {high} contradict each other")
        if high.seconds < low.seconds:
            raise PlannerConfigError(
                f"{high} makes {low} pointless: a higher quantile cannot be promised a shorter time"
            )


def promises_of(promises: list[Promise], model: str) -> list[Promise]:
    """The promises that hold for a model: its own where it has some of a metric, else all's."""
    own = [promise for promise in promises if promise.model == model]
    metrics = {promise.metric for promise in own}
    return own + [p for p in promises if not p.model and p.metric not in metrics]


def covers(promise: Promise, promises: Iterable[Promise]) -> Callable[[str], bool]:
    """A test of request classes: does `promise`, one of `promises`, hold for that class?

    A class that has no promise of its own about a metric falls under those without a class.
    """
    if promise.request_class:
        return lambda request_class: request_class == promise.request_class
    own = {p.request_class for p in promises if p.metric == promise.metric and p.request_class}
    return lambda request_class: request_class not in own
