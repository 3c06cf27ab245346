"""The phases of starts, as the rows of a table."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmesh.bus.messages import Phase, StartPhase, StartSource
from kvmesh.cli.status.report import InstanceReport, StartingReport


class StartRow(NamedTuple):
    """One start: seconds by phase, and of the whole until now or until the worker was routable.

    `present` is the phase that it is in, empty once it is over; `sources` tells where its weights
    and compiled code came from.
    """

    instance: str
    seconds: dict[str, float]
    total_s: float
    present: str = ""
    sources: Sequence[StartSource] = ()

    def cell(self, phase: str) -> str:
        """The seconds of a phase; followed by an ellipsis while it goes on."""
        if phase not in self.seconds:
            return ""
        return f"{self.seconds[phase]:.1f}{'…' if phase == self.present else ''}"


def start_rows(
    starting: Iterable[StartingReport], members: Iterable[InstanceReport]
) -> list[StartRow]:
    """The starts in progress, then those of the workers that are there and tell theirs."""
    rows = []
    for each in starting:
        seconds = _seconds(each.worker.phases)
        seconds[each.worker.phase] = seconds.get(each.worker.phase, 0.0) + each.phase_s
        rows.append(StartRow(each.worker.instance, seconds, each.age_s, each.worker.phase))
    for member in members:
        card = member.card
        if card.phases:
            seconds = _seconds(card.phases)
            row = StartRow(card.instance, seconds, card.startup_s, sources=card.sources)
            rows.append(row)
    return rows


def phase_columns(rows: Iterable[StartRow]) -> list[str]:
    """The phases that some start has, in their order; unknown ones of newer versions last."""
    found = dict.fromkeys(phase for row in rows for phase in row.seconds)
    known = [str(phase) for phase in StartPhase]
    return [p for p in known if p in found] + [p for p in found if p not in known]


def _seconds(phases: Iterable[Phase]) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in phases}
