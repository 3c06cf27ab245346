"""Processes of one role and model together: how many are ready, and their load. Pure."""

from collections.abc import Iterable

from kvmesh.bus.discovery.directory import READY
from kvmesh.observer.columns import RowColumn, RowView, count_text, share_text
from kvmesh.observer.fleet import FleetRow
from kvmesh.runtime.logs import printable


class PoolRow:
    """The processes of one role that serve one model; figures of workers are None for others."""

    def __init__(self, role: str, model: str, rows: list[FleetRow]) -> None:
        self.role = role
        self.model = model
        self.processes = len(rows)
        self.ready = sum(row.state == READY for row in rows)
        self.draining = sum(row.state == "draining" for row in rows)
        others = sorted({row.state for row in rows} - {READY, "draining"})
        self.others = ", ".join(f"{sum(r.state == o for r in rows)} {o}" for o in others)
        loaded = [row for row in rows if row.running is not None]
        self.running = sum(row.running or 0 for row in loaded) if loaded else None
        self.waiting = sum(row.waiting or 0 for row in loaded) if loaded else None
        self.kv_used = _mean([row.kv_used for row in loaded])
        self.kv_cached = _mean([row.kv_cached for row in loaded])
        self.slowest = min((row.speed for row in loaded if row.speed is not None), default=None)


def pools(rows: Iterable[FleetRow]) -> list[PoolRow]:
    """The pools of a fleet."""
    found: dict[tuple[str, str], list[FleetRow]] = {}
    for row in rows:
        found.setdefault((row.role, row.model), []).append(row)
    return [PoolRow(role, model, members) for (role, model), members in found.items()]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


POOLS = RowView(
    "pools",
    (
        RowColumn("role", "role", number=False),
        RowColumn("model", "model", printable, number=False),
        RowColumn("processes", "processes", count_text),
        RowColumn("ready", "ready", count_text),
        RowColumn("draining", "draining", count_text),
        RowColumn("others", "others", number=False),
        RowColumn("running", "running", count_text),
        RowColumn("waiting", "waiting", count_text),
        RowColumn("kv_used", "KV used", share_text),
        RowColumn("kv_cached", "cached", share_text),
        RowColumn("slowest", "slowest", lambda v: "" if v is None else f"{v:.1f}×"),
    ),
    "role",
    False,
)
