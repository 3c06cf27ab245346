"""The verdict on promises, from the records of a simulation that runs or has ended."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.records import Column, Records

STEADY = 0.25, 0.85  # the part of the arrivals that counts, as shares of their number
LOOKS = 128  # at the records in a run

Outcome = tuple[tuple[float, ...], tuple[float, ...]]


def _never() -> tuple[Records, float]:
    raise RuntimeError("the watch has no simulation")


class PromiseWatch:
    """Looks at a running simulation, and stops it once the rest cannot matter.

    That is once all requests that count have ended, with the outcome of the whole run, or, unless
    `whole`, once so many of them are late that a promise is broken whatever follows.
    `look` returns the records and the time; `stop` ends the simulation. `broken`, if set, has the
    upper bound of each share and the lower bound of each quantile (seconds).
    """

    def __init__(self, promises: Sequence[Promise], rounds: int, whole: bool) -> None:
        self._promises = promises
        self._whole = whole
        self._first = int(rounds * STEADY[0])
        self._last = max(int(rounds * STEADY[1]), 1)
        self._every = max(rounds // LOOKS, 1)
        self._ended = 0
        self.look: Callable[[], tuple[Records, float]] = _never
        self.stop: Callable[[], None] = lambda: None
        self.broken: Outcome | None = None

    def round_ended(self) -> None:
        """Count a round that has ended; look at the records now and then."""
        self._ended += 1
        if self._ended % self._every or self._ended <= self._first:
            return
        records, now = self.look()
        arrived = records.column("arrived")
        arrived[~(arrived < now)] = np.nan  # others may still arrive now
        steady = self._steady(arrived)
        if not len(steady):
            return
        ended = records.column("ended")[steady]
        complete = len(steady) == self._last - self._first and not np.isnan(ended).any()
        if complete:
            self.stop()
        elif not self._whole:
            self._stop_if_broken(records, steady, now)

    def _stop_if_broken(self, records: Records, steady: NDArray[np.intp], now: float) -> None:
        """Stop if too many requests are late for certain.

        Requests that still generate may stay out of the count: the shares are of all that may
        count, so they are upper bounds.
        """
        count = self._last - self._first
        values, served = _values(records), _served(records)[steady]
        ended = ~np.isnan(records.column("ended"))[steady]
        waited = now - records.column("arrived")[steady]
        shares, quantiles = [], []
        for promise in self._promises:
            value = values[promise.metric][steady]
            if promise.metric == "itl":
                value = np.where(ended, value, 0.0)
            else:
                value = np.where(np.isnan(value), waited, value)
            value = np.where(served, np.nan_to_num(value, nan=inf), inf)
            late = int(np.sum(value > promise.seconds))
            shares.append((count - late) / count)
            padded = np.concatenate((np.zeros(count - len(value)), value))
            quantiles.append(float(np.quantile(padded, promise.quantile, method="higher")))
        if any(share < p.quantile for share, p in zip(shares, self._promises, strict=True)):
            self.broken = tuple(shares), tuple(quantiles)
            self.stop()

    def outcome(self, records: Records) -> Outcome:
        """The share of requests that keep each promise, and the promised quantile (seconds)."""
        steady = self._steady(records.column("arrived"), arrived_only=False)
        values, served = _values(records), _served(records)
        first, ended = records.column("first_token"), records.column("ended")
        generating = ~np.isnan(first) & np.isnan(ended)
        shares, quantiles = [], []
        for promise in self._promises:
            counted = steady[~generating[steady]] if promise.metric == "itl" else steady
            value = values[promise.metric]
            reached = np.where(served & ~np.isnan(value), value, inf)
            reached = reached[counted] if len(counted) else np.zeros(1)
            shares.append(float(np.mean(reached <= promise.seconds)))
            quantiles.append(float(np.quantile(reached, promise.quantile, method="higher")))
        return tuple(shares), tuple(quantiles)

    def _steady(self, arrived: Column, arrived_only: bool = True) -> NDArray[np.intp]:
        """Indices of the requests that count, in the order of their arrival."""
        last = min(self._last, int(np.sum(~np.isnan(arrived)))) if arrived_only else self._last
        return np.argsort(arrived, kind="stable")[self._first : last]


def _values(records: Records) -> dict[str, Column]:
    """The latencies that promises bound, in seconds; NaN until they are known."""
    arrived, first = records.column("arrived"), records.column("first_token")
    tokens = np.maximum(records.column("output") - 1, 1)
    return {
        "ttft": first - arrived,
        "itl": (records.column("ended") - first) / tokens,
        "queue": records.column("placed") - arrived,
    }


def _served(records: Records) -> NDArray[np.bool_]:
    return np.array([error is None for error in records.error], dtype=bool)
