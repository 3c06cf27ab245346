"""A table that fits its terminal: columns without values are left out first, then the least ones.

Names and states are never cut. Nothing is left out where the width has no limit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

WRAPPED = 24  # least width of a column of prose
INDENT = 2


@dataclass(frozen=True)
class TextColumn:
    """A column: `hide` 0 if it is always shown; of the others those with the highest go first.

    The text of one that `wraps` is prose, which is broken into lines where the width is limited.
    """

    heading: str
    hide: int = 0
    number: bool = False
    wraps: bool = False


def columns(
    *headings: str, numbers: Iterable[str] = (), hide: Iterable[str] = (), wraps: Iterable[str] = ()
) -> list[TextColumn]:
    """Columns by their headings; `hide` names those that may go, the first to go first."""
    order = list(hide)
    ranks = {heading: len(order) - place for place, heading in enumerate(order)}
    right, prose = frozenset(numbers), frozenset(wraps)
    return [TextColumn(each, ranks.get(each, 0), each in right, each in prose) for each in headings]


@dataclass(frozen=True)
class TableLayout:
    """Places of the columns that are shown, in groups of one table each, and of those that are not.

    `empty` of them have no values. `stacked`: the first column has a line of its own.
    """

    groups: Sequence[Sequence[int]]
    hidden: Sequence[int] = ()
    empty: Sequence[int] = ()
    stacked: bool = False


class FittedTable:
    """A table for a console of any width; a cell without style is plain text, not markup.

    `split`: a comparison of columns, which is split into several tables rather than lose any. The
    note about hidden columns is left out without `note`, for screens that have no line for it.
    """

    def __init__(
        self,
        wanted: Sequence[TextColumn],
        title: str = "",
        gap: int = 2,
        split: bool = False,
        note: bool = True,
    ) -> None:
        self.columns = list(wanted)
        self.rows: list[list[Text]] = []
        self._title = title
        self._gap = gap
        self._split = split
        self._note = note

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; cells that are missing at its end are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        texts += [Text()] * (len(self.columns) - len(texts))
        for text in texts if style else ():
            text.stylize(style)
        self.rows.append(texts)

    def layout(self, width: int) -> TableLayout:
        """The columns for a terminal of `width` columns."""
        shown = list(range(len(self.columns)))
        if self._width(shown) <= width:
            return TableLayout([shown])
        empty = [n for n in shown if self.columns[n].hide and self._is_empty(n)]
        valued = [n for n in shown if n not in empty]
        shown, hidden = self._fitting(valued, width)
        if self._width(shown) <= width:
            return TableLayout([shown], hidden, empty)
        if self._split:
            return TableLayout(self._groups(shown, width), hidden, empty)
        below, hidden = self._fitting(valued[1:], width - INDENT)
        return TableLayout([[valued[0], *below]], hidden, empty, stacked=True)

    def note(self, layout: TableLayout, width: int) -> Text | None:
        """A line that names the hidden columns; None if there are none."""
        hidden, empty = (
            ", ".join(self.columns[place].heading for place in places)
            for places in (layout.hidden, layout.empty)
        )
        if hidden:
            also = f"; empty: {empty}" if empty else ""
            text = f"hidden at {width} columns (| less -S shows all): {hidden}{also}"
            return Text(text, "dim italic")
        return (
            Text(f"hidden at {width} columns, as empty: {empty}", "dim italic") if empty else None
        )

    def show(self, console: Console) -> None:
        """Print it, no line cut."""
        console.print(self, crop=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        layout = self.layout(width)
        if self._title:
            yield Text(self._title, "italic", no_wrap=True, overflow="ignore")
        for number, group in enumerate(layout.groups):
            if number:
                yield Text()
            lines = self._stacked(console, group, width) if layout.stacked else None
            for line in lines or self._lines(console, group, width):
                line.rstrip()
                line.no_wrap, line.overflow = True, "ignore"
                yield line
        note = self.note(layout, width) if self._note else None
        if note is not None:
            yield note

    def _fitting(self, valued: Sequence[int], width: int) -> tuple[list[int], list[int]]:
        """The columns that stay, and those that go: no more than necessary, the least first."""
        shown, hidden = list(valued), list[int]()
        for place in sorted(valued, key=lambda n: -self.columns[n].hide):
            if self._width(shown) <= width or not self.columns[place].hide:
                break
            shown.remove(place)
            hidden.append(place)
        return shown, sorted(hidden)

    def _is_empty(self, place: int) -> bool:
        return not any(row[place].plain.strip() for row in self.rows)

    def _cell_width(self, place: int, least: bool = True) -> int:
        """Width of a column; of prose the `least` one."""
        column = self.columns[place]
        widest = max((row[place].cell_len for row in self.rows), default=0)
        if column.wraps and least:
            widest = min(widest, WRAPPED)
        return max(Text(column.heading).cell_len, widest)

    def _width(self, shown: Sequence[int]) -> int:
        return sum(map(self._cell_width, shown)) + self._gap * max(0, len(shown) - 1)

    def _groups(self, shown: Sequence[int], width: int) -> list[list[int]]:
        """The columns by table; the first one is in each of them."""
        first, *others = shown
        groups: list[list[int]] = [[first]]
        for place in others:
            if len(groups[-1]) > 1 and self._width([*groups[-1], place]) > width:
                groups.append([first])
            groups[-1].append(place)
        return groups

    def _widths(self, shown: Sequence[int], width: int) -> list[int]:
        """Widths of the columns; those of prose share what others leave, if anything."""
        widths = [self._cell_width(place) for place in shown]
        spare = width - sum(widths) - self._gap * max(0, len(shown) - 1)
        for number, place in enumerate(shown):
            more = min(max(0, spare), self._cell_width(place, least=False) - widths[number])
            widths[number] += more
            spare -= more
        return widths

    def _lines(
        self, console: Console, shown: Sequence[int], width: int, rows: bool = True
    ) -> Iterator[Text]:
        widths = self._widths(shown, width)
        if any(self.columns[place].heading for place in shown):
            yield self._line([self._heading(place) for place in shown], shown, widths)
        for row in self.rows if rows else ():
            yield from self._row(console, row, shown, widths)

    def _row(
        self, console: Console, row: Sequence[Text], shown: Sequence[int], widths: Sequence[int]
    ) -> Iterator[Text]:
        """The lines of a row; more than one if prose wraps."""
        cells = [
            list(row[place].wrap(console, size)) if self.columns[place].wraps else [row[place]]
            for place, size in zip(shown, widths, strict=True)
        ]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else Text() for cell in cells]
            yield self._line(parts, shown, widths)

    def _line(self, cells: Sequence[Text], shown: Sequence[int], widths: Sequence[int]) -> Text:
        line = Text()
        for number, (cell, place, size) in enumerate(zip(cells, shown, widths, strict=True)):
            pad = " " * max(0, size - cell.cell_len)
            number_first = self.columns[place].number
            line.append(" " * self._gap if number else "")
            line.append_text(Text(pad) + cell if number_first else cell + pad)
        return line

    def _heading(self, place: int) -> Text:
        return Text(self.columns[place].heading, "dim")

    def _stacked(self, console: Console, shown: Sequence[int], width: int) -> Iterator[Text]:
        """Each row's first cell on its own line, whole, and its others below.

        Prose has all of the lower lines, where the other cells fit into the first.
        """
        first = [n for n in shown if not self.columns[n].wraps]
        if len(first) == len(shown) or self._width(first) > width:
            first = list(shown[:1])
        others = [n for n in shown if n not in first]
        upper, lower = self._widths(first, width), self._widths(others, width - INDENT)
        indent = " " * INDENT
        if any(self.columns[n].heading for n in shown):
            yield self._line([self._heading(n) for n in first], first, upper)
            yield Text(indent) + self._line([self._heading(n) for n in others], others, lower)
        for row in self.rows:
            yield self._line([row[n] for n in first], first, upper)
            for line in self._row(console, row, others, lower):
                yield Text(indent) + line
