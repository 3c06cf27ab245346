"""Tables at every width: names and states stay whole, the least columns go first."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from kvmesh.terminal.console import UNLIMITED
from kvmesh.terminal.tables import FittedTable, TextColumn, columns

NAME = "llama-3-70b-instruct-gpu-node-17-worker-0-e6c78b37"


def shown(table: FittedTable, width: int) -> list[str]:
    out = io.StringIO()
    table.show(Console(file=out, width=width))
    return out.getvalue().splitlines()


def fleet(*rows: tuple[str | Text, ...]) -> FittedTable:
    headings = columns(
        *("instance", "state", "speed", "model", "load"),
        numbers=("speed",),
        hide=("load", "speed", "model"),
    )
    table = FittedTable(headings)
    for row in rows or ((NAME, "ready", "", "m", "1 running, 0 waiting"),):
        table.add_row(*row)
    return table


def test_without_a_limit_every_column_is_there_on_one_line() -> None:
    head, row = shown(fleet(), UNLIMITED)
    assert head.split() == ["instance", "state", "speed", "model", "load"]
    assert row.split() == [NAME, "ready", "m", *["1", "running,", "0", "waiting"]]


def test_columns_without_values_go_first_then_the_least() -> None:
    lines = shown(fleet(), 90)
    assert lines[0].split() == ["instance", "state", "model", "load"]
    assert lines[-1] == "hidden at 90 columns, as empty: speed"
    lines = shown(fleet(), 70)
    assert lines[0].split() == ["instance", "state", "model"]
    text = "hidden at 70 columns (| less -S shows all): load; empty: speed"
    assert lines[-1] == text


def test_names_and_states_stay_whole_where_nothing_fits() -> None:
    lines = shown(fleet(), 40)
    assert lines[:2] == ["instance", "  state  model  load"]
    assert lines[2:4] == [NAME, "  ready  m      1 running, 0 waiting"]


def test_prose_takes_the_place_that_others_leave() -> None:
    table = FittedTable(columns("name", "reason", "now", wraps=("reason",)))
    table.add_row("a", "eviction by recency has as many hits, or more", "off")
    assert shown(table, 40) == [
        "name  reason                         now",
        "a     eviction by recency has as     off",
        "      many hits, or more",
    ]
    assert len(shown(table, UNLIMITED)) == 2


def test_prose_beside_a_long_name_has_lines_of_its_own() -> None:
    table = FittedTable([TextColumn(""), TextColumn(""), TextColumn("", wraps=True)])
    table.add_row("ok", "nats", "2.15.1")
    table.add_row("fault", NAME, "it has no NATS server, or that has no disk: start one")
    assert shown(table, 60) == [
        "ok     nats",
        "  2.15.1",
        f"fault  {NAME}",
        "  it has no NATS server, or that has no disk: start one",
    ]


def test_a_comparison_is_split_rather_than_cut() -> None:
    table = FittedTable(columns("", "kv", "round-robin", "random"), split=True)
    table.add_row("TTFT p50, ms", "1", "2", "3")
    assert [line.split() for line in shown(table, 30)] == [
        ["kv", "round-robin"],
        ["TTFT", "p50,", "ms", "1", "2"],
        [],
        ["random"],
        ["TTFT", "p50,", "ms", "3"],
    ]


def test_a_cell_is_no_markup() -> None:
    assert shown(fleet(("[red]x[/red]", Text("ready", "red"))), 80)[1] == "[red]x[/red]  ready"


@given(
    st.lists(st.tuples(*[st.text("ab-é世 ", max_size=30)] * 5), max_size=4),
    st.integers(10, 200),
)
def test_what_is_shown_is_whole_and_the_rest_is_named(
    rows: list[tuple[str, ...]], width: int
) -> None:
    table = fleet(*rows) if rows else fleet()
    layout = table.layout(width)
    places = [place for group in layout.groups for place in group]
    assert sorted({*places, *layout.hidden, *layout.empty}) == list(range(5))
    assert {0, 1} <= set(places)
    text = "\n".join(shown(table, width))
    for row in table.rows:
        for place in places:
            assert row[place].plain.strip() in text
    note = table.note(layout, width)
    for place in (*layout.hidden, *layout.empty):
        assert note is not None
        assert table.columns[place].heading in note.plain
