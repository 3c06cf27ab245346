"""The sessions: their turns as lanes over time, and a table of them."""

import time
from collections.abc import Mapping
from typing import Any

from nicegui import events, ui

from kvmesh.dashboard.elements.lanes import LaneChart
from kvmesh.dashboard.elements.links import session_href
from kvmesh.dashboard.elements.shell import every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.lane_bars import MOST_BARS
from kvmesh.dashboard.state.sessions import SessionLane
from kvmesh.observer.columns import SESSIONS

LANES = 30
DRAW_S = 2.0
ORDER_S = 10.0  # lanes that change places more often cannot be followed
WINDOWS = {120: "2 minutes", 300: "5 minutes", 900: "15 minutes"}


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page."""
    heading("Turns over time")
    lanes = _Lanes(mesh)
    heading("All sessions")
    table = PagedTable(
        SESSIONS,
        mesh.session_rows,
        "sessions",
        lambda row: session_href(row.tenant, row.session),
    ).show()

    def refresh() -> None:
        lanes.refresh()
        table.refresh()

    every(DRAW_S, refresh)


class _Lanes:
    """The lanes of one page of sessions, the most recently used first."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._first = 0
        self._find = ""
        self._window_s = 120.0
        self._shown: list[SessionLane] = []
        self._ordered_at = float("-inf")
        with ui.element("div").classes("controls"):
            ui.select(WINDOWS, value=120, label="Window", on_change=self._on_window).props("dense")
            ui.input(label="Session or tenant", on_change=self._on_find).props(
                "dense clearable debounce=300"
            )
            self._back = ui.button("Later", on_click=lambda: self._turn(-LANES)).props(
                "flat dense no-caps"
            )
            self._on = ui.button("Earlier", on_click=lambda: self._turn(LANES)).props(
                "flat dense no-caps"
            )
            self._note = ui.label().classes("quiet").props('role="status"')
        ui.label(
            f"A lane shows its last {MOST_BARS // LANES} turns at most, and stands still under"
            " the pointer; a click on a turn opens it."
        ).classes("quiet")
        self._chart = LaneChart("Turns of sessions over time; the table of sessions follows")

    def refresh(self) -> None:
        """Draw the lanes as they are now."""
        now = time.time()
        if time.monotonic() - self._ordered_at >= ORDER_S:
            self._order(now)
        lanes = [lane for lane in self._shown if lane.turns]
        names = [_name(lane) for lane in lanes]
        self._chart.draw(names, [lane.turns for lane in lanes], now - self._window_s, now)

    def _order(self, now: float) -> None:
        found = list(self._mesh.requests.lanes.latest(now - self._window_s, self._find))
        self._first = min(self._first, max(len(found) - 1, 0) // LANES * LANES)
        last = min(self._first + LANES, len(found))
        self._shown = found[self._first : last]
        self._ordered_at = time.monotonic()
        range_text = f"{self._first + 1:,} to {last:,} of {len(found):,} sessions"
        self._note.text = range_text if found else "No session had a turn in this window."
        self._back.set_enabled(self._first > 0)
        self._on.set_enabled(last < len(found))

    def _turn(self, lanes: int) -> None:
        self._first = max(self._first + lanes, 0)
        self._again()

    def _on_window(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self._window_s = float(event.value) if event.value in WINDOWS else self._window_s
        self._again()

    def _on_find(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self._find, self._first = str(event.value or "")[:200], 0
        self._again()

    def _again(self) -> None:
        self._ordered_at = float("-inf")
        self.refresh()


def _name(lane: SessionLane) -> str:
    return f"{lane.session} · {lane.tenant}" if lane.tenant else lane.session
