"""The starts of workers by phase, those in progress as well as those that are over. Pure."""

from collections.abc import Iterable

from kvmesh.bus.messages import Instance, Phase, Starting
from kvmesh.observer.columns import PARTS, RowColumn, RowView, sources_text
from kvmesh.runtime.logs import printable


class WorkerStartRow:
    """One start. `total_s` is None while it goes on; then the last of the `phases` is the present.

    `weights` and `code` say where these came from.
    """

    def __init__(self, instance: str, model: str, phases: str, total_s: float | None) -> None:
        self.instance = instance
        self.model = model
        self.phases = phases
        self.total_s = total_s
        self.weights = self.code = ""


def worker_starts(
    cards: Iterable[Instance], starting: Iterable[Starting], now: float
) -> list[WorkerStartRow]:
    """A row for each start that is known; `now` is the Unix time."""
    rows = []
    for worker in starting:
        seconds = {phase.name: phase.seconds for phase in worker.phases}
        present = seconds.pop(worker.phase, 0.0) + max(now - worker.since, 0.0)
        phases = _text([Phase(*each) for each in (*seconds.items(), (worker.phase, present))])
        rows.append(WorkerStartRow(worker.instance, worker.model, f"{phases}…", None))
    for card in cards:
        if card.phases:
            model = card.model.name if card.model is not None else card.parked_for
            row = WorkerStartRow(card.instance, model, _text(card.phases), card.startup_s)
            row.weights = sources_text(card.sources, "weights")
            row.code = sources_text(card.sources, "code")
            rows.append(row)
    return rows


def _text(phases: Iterable[Phase]) -> str:
    return ", ".join(f"{printable(phase.name)} {phase.seconds:,.1f} s" for phase in phases)


START_VIEW = RowView(
    "starts",
    (
        RowColumn("instance", "instance", number=False),
        RowColumn("model", "model", number=False),
        RowColumn("total_s", "total", lambda v: "starting" if v is None else f"{v:,.1f} s"),
        RowColumn("phases", "phases", number=False, wraps=True),
        RowColumn("weights", PARTS["weights"], number=False, wraps=True),
        RowColumn("code", PARTS["code"], number=False, wraps=True),
    ),
    "instance",
    False,
)
