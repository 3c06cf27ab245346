"""A table that sends the browser only the rows that it shows: sorted, filtered and cut here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nicegui import events, ui

from kvmesh.observer.columns import RowView

PAGE_ROWS = 25
MOST_TEXT = 160  # of a cell
# a link in the first column, if the row has one
FIRST_CELL = """
<q-td :props="props"><a v-if="props.row.href" :href="props.row.href"
  :data-focus="'LABEL ' + props.row.key">{{ props.value }}</a>
<template v-else>{{ props.value }}</template></q-td>
"""
# Quasar sorts on a click of the cell; a button in it makes that reachable by keyboard
HEADING = """
<q-th :props="props" :aria-sort="!props.col.__thClass.includes('sorted') ? 'none'
  : props.col.__thClass.includes('sort-desc') ? 'descending' : 'ascending'">
<button type="button" class="sort" :data-focus="'LABEL by ' + props.col.name">
{{ props.col.label }}</button></q-th>
"""


@dataclass
class PagedTable:
    """The rows of `view`; `href(row)` is where the first cell leads, `rows()` are those of now.

    A `sparse` one leaves out columns without a text, of those that its view may hide.
    """

    view: RowView
    rows: Callable[[], Iterable[Any]]
    label: str
    href: Callable[[Any], str] | None = None
    page_rows: int = PAGE_ROWS
    filtered: bool = True
    sparse: bool = False
    _find: str = ""
    _page: dict[str, Any] = field(default_factory=dict)
    _columns: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> "PagedTable":
        """Build the elements: a field that filters, unless it is not wanted, and the table."""
        self._page = {
            "sortBy": self.view.sort,
            "descending": self.view.reverse,
            "page": 1,
            "rowsPerPage": self.page_rows,
            "rowsNumber": 0,
        }
        if self.filtered:
            ui.input(label="Filter", on_change=self._on_filter).props(
                f'dense clearable debounce=300 aria-label="Filter {self.label}"'
            )
        self._columns = [
            {
                "name": column.name,
                "label": column.heading,
                "field": column.name,
                "sortable": True,
                "align": "right" if column.number else "left",
                "classes": "words" if column.wraps else "name" if not column.number else "",
            }
            for column in self.view.columns
        ]
        self._table = ui.table(rows=[], columns=self._columns, row_key="key", pagination=self._page)
        self._table.props(f'flat dense binary-state-sort role="region" aria-label="{self.label}"')
        self._table.props["no-data-label"] = f"no {self.label}"
        self._table.props(f"rows-per-page-options={[self.page_rows, 100]}")
        first = f"body-cell-{self.view.columns[0].name}"
        for slot, template in (("header-cell", HEADING), (first, FIRST_CELL)):
            self._table.add_slot(slot, template.replace("LABEL", self.label))
        self._table.on("request", self._on_request, ["pagination"])
        return self

    def refresh(self) -> None:
        """Show the rows of now."""
        page, find = self._page, self._find.lower()
        rows = list(self.rows())
        if find:
            texts = [column for column in self.view.columns if not column.number]
            rows = [
                r for r in rows if any(find in c.text(getattr(r, c.name)).lower() for c in texts)
            ]
        ordered = self.view.ordered(rows, page["sortBy"] or self.view.sort, page["descending"])
        size = page["rowsPerPage"] or self.page_rows
        last = max(1, -(-len(ordered) // size))
        page["page"] = min(page["page"], last)
        page["rowsNumber"] = len(ordered)
        first = (page["page"] - 1) * size
        self._table.props["pagination"] = dict(page)
        self._table.props["hide-bottom"] = 0 < len(ordered) <= size
        self._table.rows = [self._row(row) for row in ordered[first : first + size]]
        if self.sparse:
            self._leave_out(rows)

    def _leave_out(self, rows: list[Any]) -> None:
        """Leave out the columns in `view.hide` of which no row has a text."""
        empty = {
            column.name
            for column in self.view.columns
            if column.name in self.view.hide
            and rows
            and not any(column.text(getattr(row, column.name)) for row in rows)
        }
        shown = [column for column in self._columns if column["name"] not in empty]
        if shown != self._table.columns:
            self._table.columns = shown

    def _row(self, row: Any) -> dict[str, Any]:
        cells = {c.name: _cut(c.text(getattr(row, c.name))) for c in self.view.columns}
        href = self.href(row) if self.href is not None else ""
        key = href or "\x1f".join(cells[c.name] for c in self.view.columns[:2])
        return {**cells, "key": key, "href": href}

    def _on_request(self, event: events.GenericEventArguments) -> None:
        asked = event.args["pagination"]
        if isinstance(asked, dict):
            names = {column.name for column in self.view.columns}
            self._page.update(
                sortBy=asked.get("sortBy") if asked.get("sortBy") in names else self.view.sort,
                descending=bool(asked.get("descending")),
                page=max(1, int(asked.get("page") or 1)),
                rowsPerPage=min(100, max(1, int(asked.get("rowsPerPage") or self.page_rows))),
            )
        self.refresh()

    def _on_filter(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self._find = str(event.value or "")[:200]
        self._page["page"] = 1
        self.refresh()


def _cut(text: str) -> str:
    """A cell's text; callers choose names, and some choose long ones."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
