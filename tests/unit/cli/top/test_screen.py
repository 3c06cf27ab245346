"""Keys, order and safe text of the frames."""

import io

from rich.console import Console

from kvmesh.bus.messages import Outcome
from kvmesh.cli.top.controls import TopControls, split_keys
from kvmesh.cli.top.screen import TopStatus, frame
from kvmesh.observer.activity import Activity, by_session
from kvmesh.observer.columns import FLEET, SESSIONS, TENANTS

STATUS = TopStatus("mesh kvmesh on h:4222", 300.0, 0.0)


def sessions(*names: str) -> list[Activity]:
    activities = by_session(300.0)
    for number, name in enumerate(names):
        activities.add(
            Outcome(
                request="r",
                instance="w",
                time=0.0,
                cached_tokens=0,
                output_tokens=0,
                ttft_s=None,
                total_s=0.0,
                finish="stop",
                session=name,
                prompt_tokens=number,
            ),
            float(number),
        )
    return activities.rows(0.0)


def shown(controls: TopControls, rows: list[Activity], status: TopStatus = STATUS) -> str:
    out = io.StringIO()
    Console(width=160, height=9, file=out).print(frame(controls, rows, status, 8 + 1, 160))
    return out.getvalue()


def controls() -> TopControls:
    return TopControls(SESSIONS, SESSIONS.sort, SESSIONS.reverse)


def press(state: TopControls, *keys: str) -> TopControls:
    for key in keys:
        state.press(key, 4)
    return state


def test_keys_choose_view_and_order() -> None:
    state = press(controls(), "3")
    assert (state.view, state.sort, state.reverse) == (TENANTS, "requests_per_min", True)
    press(state, "s", "r")
    assert (state.sort, state.reverse) == ("requests", False)
    press(state, *["s"] * 8)
    assert (state.sort, state.reverse) == ("tenant", False)
    press(state, "1", "5", "\x1b", "é")
    assert (state.view, state.paused, state.help, state.quit) == (FLEET, False, False, False)
    press(state, "p", "?", "q")
    assert (state.paused, state.help, state.quit) == (True, True, True)


def test_sequences_of_a_terminal_are_single_keys() -> None:
    assert split_keys("s\x1b[A\x1b[6~\x1bOBq\x1b[") == [
        "s",
        "\x1b[A",
        "\x1b[6~",
        "\x1bOB",
        "q",
        "\x1b[",
    ]


def test_rows_are_ordered_and_those_without_a_value_come_last() -> None:
    rows = sessions("a", "b", "c")
    assert [row.session for row in SESSIONS.ordered(rows, "prompt_tokens", True)] == ["c", "b", "a"]
    assert [row.session for row in SESSIONS.ordered(rows, "reused", True)][-1] == "a"


def test_a_frame_shows_the_rows_that_fit() -> None:
    rows = sessions(*(f"s{n}" for n in range(9)))
    state = controls()
    text = shown(state, rows)
    assert "1–4 of 9" in text
    assert "s8" in text
    assert "s4" not in text
    press(state, " ", " ", " ")
    text = shown(state, rows)
    assert "6–9 of 9" in text
    assert "s0" in text
    assert state.first == 5
    press(state, "k")
    assert "5–8 of 9" in shown(state, rows)


def test_names_cannot_control_the_terminal() -> None:
    text = shown(controls(), sessions("a\x1b[2J[red]b\n\x9bc"))
    assert "a\\x1b[2J[red]b\\n\\x9bc" in text


def test_trouble_replaces_the_keys() -> None:
    assert "q quit" in shown(controls(), [])
    assert "no connection" in shown(controls(), [], TopStatus("m", 300.0, 0.0, "no connection"))
    assert "\\x1b warning" in shown(controls(), [], TopStatus("m", 300.0, 0.0, "", "\x1b warning"))
