"""A small table whose rows change seldom: all of them are sent, in their order."""

from collections.abc import Iterable, Sequence

from nicegui import ui

from kvmesh.runtime.logs import printable


def plain_table(
    label: str, headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0
) -> None:
    """Show a table; the last `numbers` columns are aligned to the right."""
    first_number = len(headings) - numbers
    region = ui.element("div").classes("scroll").props('role="region" tabindex="0"')
    region.props(f'aria-label="{label}"')
    with region, ui.element("table").classes("plain"):
        with ui.element("thead"), ui.element("tr"):
            for index, heading in enumerate(headings):
                with ui.element("th").props('scope="col"').classes(_side(index, first_number)):
                    ui.label(heading)
        with ui.element("tbody"):
            for row in rows:
                with ui.element("tr"):
                    for index, text in enumerate(row):
                        with ui.element("td").classes(_side(index, first_number)):
                            ui.label(printable(text))


def headed_table(label: str, rows: Iterable[Sequence[str]]) -> None:
    """Show a table whose first row has the headings, and whose first column names the rows."""
    headings, *body = rows
    plain_table(label, headings, body, len(headings) - 1)


def _side(index: int, first_number: int) -> str:
    return "number" if index >= first_number else ""
