"""One session: its lane, the tokens of its turns, and a table of them."""

import time
from collections.abc import Mapping
from typing import Any

from nicegui import ui

from kvmesh.dashboard.elements.charts import COLOURS, TEXT
from kvmesh.dashboard.elements.lanes import LaneChart
from kvmesh.dashboard.elements.links import request_href
from kvmesh.dashboard.elements.shell import every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.requests.rows import TURNS, TurnRow, turn_rows
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.observer.session_turns import SessionTurns
from kvmesh.runtime.logs import printable

DRAW_S = 2.0
MOST_TURNS = 200  # of the chart
CLASSES = {"reused": COLOURS[0], "lost": COLOURS[4], "new": COLOURS[1], "not counted": COLOURS[6]}


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page of the session that `tenant` and `name` of the URL name."""
    tenant, name = query.get("tenant", ""), query.get("name", "")
    turns: list[SeenRequest] = []
    rows: list[TurnRow] = []
    title = f"{printable(name)} of tenant {printable(tenant)}" if tenant else printable(name)
    ui.label(title).classes("subject")
    summary = ui.label().classes("lines")
    lane = LaneChart("Turns of the session over time; the table of turns follows")
    chart = _tokens("Prompt tokens by turn; the table of turns follows")
    heading("Turns")
    table = PagedTable(TURNS, lambda: rows, "turns", lambda row: request_href(row.request)).show()

    def refresh() -> None:
        turns[:] = mesh.requests.lanes.of(tenant, name)
        rows[:] = turn_rows(turns)
        summary.text = _summary(turns, name) or (
            f"No turn of this session within the last {mesh.window_s / 60:g} minutes."
            " kvmesh explain --session NAME reads the whole stream."
        )
        lane.draw([name], [turns], *_span(turns, time.time()))
        _draw_tokens(chart, rows[-MOST_TURNS:])
        table.refresh()

    every(DRAW_S, refresh)


def _span(turns: list[SeenRequest], now: float) -> tuple[float, float]:
    """The time from the first turn to the end of the last one."""
    since = min((turn.arrived for turn in turns), default=now)
    ends = [now if turn.outcome is None else turn.outcome.time for turn in turns]
    until = max(ends, default=now)
    return since, max(until, since + 1.0)


def _summary(turns: list[SeenRequest], name: str) -> str:
    found = SessionTurns(name, 1)
    for turn in turns:
        if turn.outcome is not None:
            found.add(turn.outcome)
    return "\n".join(map(printable, found.summary()))


def _tokens(title: str) -> ui.echart:
    """A chart of stacked bars, one for each turn."""
    axis = {"axisLabel": {"color": TEXT}}
    options: dict[str, Any] = {
        "aria": {"enabled": True, "label": {"description": title}},
        "animation": False,
        "title": {"text": "Prompt tokens by turn", "left": 0, "textStyle": {"fontSize": 13}},
        "legend": {"top": 0, "right": 0, "textStyle": {"color": TEXT}, "data": list(CLASSES)},
        "grid": {"left": 8, "right": 8, "top": 34, "bottom": 8, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {"type": "category", "data": [], **axis},
        "yAxis": {"type": "value", "splitLine": {"lineStyle": {"color": "#8884"}}, **axis},
        "series": [
            {
                "type": "bar",
                "name": each,
                "stack": "prompt",
                "barMaxWidth": 28,
                "itemStyle": {"color": colour},
                "data": [],
            }
            for each, colour in CLASSES.items()
        ],
    }
    options["title"]["textStyle"]["color"] = TEXT
    return ui.echart(options).classes("chart").props(f'role="img" aria-label="{title}"')


def _draw_tokens(chart: ui.echart, rows: list[TurnRow]) -> None:
    options = chart.options
    options["xAxis"]["data"] = [f"{row.turn}" for row in rows]
    counted = [row.reused is not None for row in rows]
    values = (
        [row.reused or 0 for row in rows],
        [row.lost or 0 for row in rows],
        [row.new or 0 for row in rows],
        [0 if known else row.prompt_tokens or 0 for row, known in zip(rows, counted, strict=True)],
    )
    for series, data in zip(options["series"], values, strict=True):
        series["data"] = data
    chart.update()
