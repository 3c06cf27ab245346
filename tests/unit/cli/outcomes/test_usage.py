"""Sums of the requests' use."""

import io
from random import Random
from typing import cast

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.bus.messages import CacheAccount, Outcome, PromptChange
from kvmesh.cli.outcomes import show_session, slow, usage
from kvmesh.cli.outcomes.slow import SlowestRequests
from kvmesh.cli.outcomes.usage import OTHER, UsageTable, Use, render
from kvmesh.observer.session_turns import SessionTurns
from kvmesh.runtime.logs import printable

OUTCOME = Outcome(
    request="r", instance="w", time=1.0, cached_tokens=100, output_tokens=7, ttft_s=0.1,
    total_s=1.0, finish="stop", model="m", tenant="a", key="k", session="t\x1fs",
    prompt_tokens=150, wait_s=0.5, device_s=2.0,
)  # fmt: skip


def test_another_choice_adds_no_request_and_no_prompt() -> None:
    use = Use()
    use.add(OUTCOME)
    use.add(replace(OUTCOME, choice=1, prompt_tokens=0))
    assert use == Use(
        requests=1,
        prompt_tokens=150,
        cached_tokens=100,
        output_tokens=14,
        queue_s=1.0,
        device_s=4.0,
    )


@pytest.mark.parametrize("dimensions", [["tenant"], ["key", "model"], ["session"]])
def test_rows_add_up_to_the_total(dimensions: list[str]) -> None:
    random, table = Random(2), UsageTable(dimensions)
    for number in range(300):
        table.add(
            replace(
                OUTCOME,
                request=f"r{number}",
                tenant=random.choice(["", "a", "b"]),
                key=random.choice(["k", "l"]),
                session=random.choice(["", "s", "t\x1fs"]),
                device_s=random.random(),
                finish=random.choice(["stop", "error"]),
            )
        )
    rows = table.rows()
    for name in Use.__struct_fields__:
        found = sum(getattr(row.use, name) for row in rows)
        assert found == pytest.approx(getattr(table.total, name))
    times = [row.use.device_s for row in rows]
    assert times == sorted(times, reverse=True)
    assert all(list(row.group) == dimensions for row in rows)


def test_the_number_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_GROUPS", 3)
    table = UsageTable(["session"])
    for number in range(10):
        table.add(replace(OUTCOME, session=f"s{number}"))
    rows = {row.group["session"]: row.use.requests for row in table.rows()}
    assert rows == {"s0": 1, "s1": 1, "s2": 1, OTHER: 7}


def test_the_rows_that_are_not_shown_are_added_up() -> None:
    table = UsageTable(["tenant"])
    for number, name in enumerate(["a", "b", "c", ""]):
        table.add(replace(OUTCOME, tenant=name, device_s=10.0 - number))
    out = io.StringIO()
    Console(file=out, width=160, highlight=False).print(render(table, 2))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert [line[0] for line in lines[1:]] == ["a", "b", "and", "total"]
    assert lines[3][:5] == ["and", "2", "more", "2", "0"]
    assert lines[4][:4] == ["total", "4", "0", "600"]


@pytest.mark.parametrize("name", ["[/x]", "[red]r", "\x1b[31mred", "a\nb", "\x9b31m"])
def test_a_name_that_a_caller_chooses_is_shown_as_it_is(name: str) -> None:
    table = UsageTable(["session"])
    table.add(replace(OUTCOME, session=f"t\x1f{name}"))
    turns = SessionTurns(name, 1)
    change = PromptChange(token=0, part="tool", way="changed", index=0, name=name)
    account = CacheAccount(prompt_tokens=1, change=change)
    turns.add(replace(OUTCOME, session=name, cache=account))
    slowest = SlowestRequests(1)
    slowest.add(replace(OUTCOME, session=name))
    console = Console(file=io.StringIO(), width=240, highlight=False)
    for shown in (
        render(table, 1),
        show_session.render(turns.turns),
        slow.render(slowest.slowest()),
    ):
        console.print(shown)
    text = cast(io.StringIO, console.file).getvalue()
    assert text.count(printable(name)) == 3
    assert printable(text.replace("\n", "")) == text.replace("\n", "")
