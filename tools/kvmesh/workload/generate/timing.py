"""The times of a workload: pauses within families of sessions, and arrivals of families."""

import numpy as np
from numpy.typing import NDArray

from kvmesh.workload.generate.exchange import ExchangeGroups
from kvmesh.workload.generate.families import family_start
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.window import TOKEN_S, planned_starts

Floats = NDArray[np.float64]
WINDOW = 16  # arrivals among which families exchange their starts
DRAINED = 0.95  # share of the requests that have ended when the next batch starts


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
    """The times at which families start, `speedup` times faster than recorded.

    Families that start about together and last about as long exchange their starts. So as many
    run at a time as in the source, also where one starts when another ends.
    """

    def __init__(self, workload: Workload, families: list[list[int]], speedup: float) -> None:
        starts = np.array([family_start(workload, family) for family in families]) / speedup
        self._order = np.argsort(starts, kind="stable")
        ordered = starts[self._order]
        mean_gap = float(np.diff(ordered).mean()) if len(ordered) > 1 else 0.0
        self._gaps: Floats = np.empty(len(starts))  # until the next family starts
        self._gaps[self._order] = np.diff(ordered, append=ordered[-1] + mean_gap)
        planned = planned_starts(workload, TOKEN_S)
        ends: list[float] = []
        self._lasts: Floats = np.empty(len(families))
        for number, family in enumerate(families):
            begin = min(planned[index] for index in family)
            lasts = [
                planned[index] - begin + workload.rounds[index].output_tokens * TOKEN_S
                for index in family
            ]
            self._lasts[number] = max(lasts)
            ends += [starts[number] - ordered[0] + seconds for seconds in lasts]
        # The next batch comes at the pace of arrivals, but not on top of sessions that all
        # started at once.
        self.period_s = max(float(self._gaps.sum()), float(np.quantile(ends, DRAINED)))

    def starts(self, batch: int, chosen: list[int], rng: np.random.Generator) -> list[float]:
        """Seconds from the start of the workload at which each chosen family of a batch starts.

        A part of the families starts without the time that the others take.
        """
        places = np.isin(self._order, chosen)
        order = self._order[places]
        windows = np.arange(len(order)) // WINDOW
        givers = ExchangeGroups(windows, self._lasts[order]).givers(rng)
        times = np.concatenate(([0.0], np.cumsum(self._gaps[order[:-1]])))[givers]
        of = dict(zip(order.tolist(), (times + batch * self.period_s).tolist(), strict=True))
        return [of[number] for number in chosen]
