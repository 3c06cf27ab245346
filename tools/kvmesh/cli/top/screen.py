"""One frame of `kvmesh top`: header, visible rows, footer. Pure."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from kvmesh.cli.top.controls import HELP, TopControls
from kvmesh.observer.columns import RowView
from kvmesh.runtime.logs import printable
from kvmesh.runtime.quantities import duration
from kvmesh.terminal.tables import FittedTable, TextColumn

FRAME_LINES = 5  # header, line of learners, headings, note on hidden columns, footer
KEYS = "1 fleet  2 sessions  3 tenants  4 caches  s sort  r reverse  p pause  ? help  q quit"
_COLOURS = {"ready": "green", "draining": "yellow", "incompatible": "red", "silent": "red"}


@dataclass(frozen=True)
class TopStatus:
    """The state of the source of the figures; `trouble` says why they do not change, if so.

    `learned` is a line about the mesh's learners, empty if they may not be asked.
    """

    mesh: str
    window_s: float
    time: float
    trouble: str = ""
    notice: str = ""
    learned: str = ""


def frame(
    controls: TopControls, rows: list[Any], status: TopStatus, height: int, width: int
) -> Group:
    """The frame for a terminal of `height` lines; `rows` are all rows of the view, unordered."""
    ordered = controls.view.ordered(rows, controls.sort, controls.reverse)
    shown = max(1, height - FRAME_LINES)
    near = ordered[controls.first : controls.first + shown]
    if table(controls.view, near, controls.sort, controls.reverse).layout(width).stacked:
        shown = max(1, (shown - 1) // 2)
    controls.first = max(0, min(controls.first, len(rows) - shown))
    first, last = controls.first, min(len(rows), controls.first + shown)
    body = (
        Text("\n".join(HELP[:shown]))
        if controls.help
        else table(controls.view, ordered[first:last], controls.sort, controls.reverse)
    )
    header = _header(controls, status, len(rows), first, last)
    return Group(header, _learned(status), body, _footer(status))


def table(view: RowView, rows: Iterable[Any], sort: str, reverse: bool) -> FittedTable:
    """The rows as a table; an arrow marks the column that they are sorted by, which is shown."""
    ranks = {name: len(view.hide) - place for place, name in enumerate(view.hide)}
    ranks[sort] = 0
    arrow = "▼" if reverse else "▲"
    shown = FittedTable(
        [
            TextColumn(
                f"{column.heading}{arrow if column.name == sort else ''}",
                ranks.get(column.name, 0),
                column.number,
            )
            for column in view.columns
        ]
    )
    for row in rows:
        shown.add_row(*(_cell(row, column) for column in view.columns))
    return shown


def _cell(row: Any, column: Any) -> Text:
    text = column.text(getattr(row, column.name))
    return Text(text, _COLOURS.get(text, "") if column.name == "state" else "")


def _header(controls: TopControls, status: TopStatus, count: int, first: int, last: int) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(status.time))
    where = f"{first + 1}–{last} of {count:,}" if count else "none yet"
    what = f"{controls.view.name} {where}"
    if controls.view.name != "fleet":
        what += f", requests that ended in the last {duration(status.window_s)}"
    line = Text(f"{status.mesh}  {clock}  {what}", "bold", no_wrap=True, overflow="ellipsis")
    return line.append("  PAUSED", "yellow") if controls.paused else line


def _learned(status: TopStatus) -> Text:
    if not status.learned:
        return Text("")
    line = f"learned, gain over the fallback: {printable(status.learned)}"
    return Text(line, "dim", no_wrap=True, overflow="ellipsis")


def _footer(status: TopStatus) -> Text:
    if status.trouble:
        return Text(status.trouble, "bold red", no_wrap=True, overflow="ellipsis")
    notice = printable(status.notice)
    return Text(notice or KEYS, "yellow" if notice else "dim", no_wrap=True, overflow="ellipsis")
