"""The times of a workload: pauses within families of sessions, and arrivals of families."""

import numpy as np
from numpy.typing import NDArray

from kvmesh.workload.generate.exchange import ExchangeGroups
from kvmesh.workload.generate.families import family_start
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.window import TOKEN_S, planned_starts

Floats = NDArray[np.float64]
WINDOW = 16  # arrivals that exchange the times before them
SWAP = 4.0  # places by which the order of arrivals changes


class Pauses:
    """The seconds that each request waits, and how similar waits are exchanged.

    Waits are similar if they are about as long and for the same activity.
    `gaps` are the seconds since the start of the session's request before, or of the family's, for
    requests that wait for none.
    """

    def __init__(self, workload: Workload, families: list[list[int]]) -> None:
        rounds = workload.rounds
        planned = planned_starts(workload, TOKEN_S)
        self.gaps = [0.0] * len(rounds)
        names: dict[tuple[str, bool, bool], int] = {}
        keys = [-1] * len(rounds)
        for family in families:
            last: dict[int, float] = {}
            latest = planned[family[0]]
            for index in family:
                round_ = rounds[index]
                if round_.after or index != family[0]:
                    name = (round_.wait, round_.session in last, bool(round_.after))
                    keys[index] = names.setdefault(name, len(names))
                since = last.get(round_.session, latest)
                self.gaps[index] = max(planned[index] - since, 0.0)
                last[round_.session] = latest = planned[index]
        waits = [r.at_s if r.after else gap for r, gap in zip(rounds, self.gaps, strict=True)]
        self._groups = ExchangeGroups(np.array(keys, np.int64), np.array(waits))

    def exchanged(self, rng: np.random.Generator) -> list[int]:
        """For each request, the one whose pause it takes."""
        givers: list[int] = self._groups.givers(rng).tolist()
        return givers


class FamilyArrivals:
    """The times at which families start, `speedup` times faster than recorded."""

    def __init__(self, workload: Workload, families: list[list[int]], speedup: float) -> None:
        starts = np.array([family_start(workload, family) for family in families]) / speedup
        self._starts: Floats = starts - starts.min()
        self._gaps: Floats = np.diff(np.sort(self._starts))
        mean_gap = float(self._gaps.mean()) if len(self._gaps) else 0.0
        planned = planned_starts(workload, TOKEN_S)
        answers = [round_.output_tokens * TOKEN_S for round_ in workload.rounds]
        lasts = [
            max(planned[i] + answers[i] for i in family) - min(planned[i] for i in family)
            for family in families
        ]
        # The next batch comes at the pace of arrivals, but not on top of sessions that all
        # started at once.
        self._span = float(self._starts.max()) + mean_gap
        self.period_s = max(self._span, float(np.mean(lasts)))

    def starts(self, batch: int, chosen: list[int], rng: np.random.Generator) -> list[float]:
        """Seconds from the start of the workload at which each chosen family of a batch starts.

        A part of the families takes a part of the time.
        """
        count = len(chosen)
        part = count / len(self._starts)
        of = self._starts[chosen]
        if part < 1 and self._span > 0:
            of = np.mod(of, self._span * part)
        order = np.argsort(of, kind="stable")
        order = order[np.argsort(np.arange(count) + rng.uniform(0, SWAP, count), kind="stable")]
        times = np.empty(count)
        times[order] = np.concatenate(([0.0], np.cumsum(self._drawn_gaps(count - 1, rng))))
        starts: list[float] = (times + batch * self.period_s).tolist()
        return starts

    def _drawn_gaps(self, count: int, rng: np.random.Generator) -> Floats:
        """Times between arrivals: all, in windows that keep the pace of the hour, or a part."""
        gaps = self._gaps
        if count < len(gaps):
            step = len(gaps) / max(count, 1)
            places = (np.arange(count) * step + rng.random(count) * step).astype(np.int64)
            return rng.permutation(np.sort(gaps)[np.minimum(places, len(gaps) - 1)])
        windows = np.arange(len(gaps)) // WINDOW
        return gaps[np.lexsort((rng.random(len(gaps)), windows))]
