"""Rows, bars and parts of requests and sessions, from what the log has seen of them."""

from typing import Any

import pytest

from kvmesh.bus.messages import (
    CacheAccount,
    CacheLoss,
    Candidate,
    Decision,
    ExpectedReturn,
    Hints,
    Outcome,
)
from kvmesh.dashboard.state import lane_bars as bars_module
from kvmesh.dashboard.state.lane_bars import RUNNING, UNKNOWN, TurnGap, lane_bars, turn_text
from kvmesh.dashboard.state.requests.parts import request_parts
from kvmesh.dashboard.state.requests.rows import (
    ENDED,
    TURNS,
    ended_rows,
    running_rows,
    turn_rows,
)
from kvmesh.dashboard.state.requests.rows import (
    RUNNING as RUNNING_VIEW,
)
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.dashboard.state.shared import Shared
from kvmesh.returns.rates import pack_rates

NOW = 1_700_000_000.0


def rank(worker: str) -> Candidate:
    return Candidate(
        instance=f"{worker}-1", worker=worker, rank=0, overlap=[3, 2], prefill=0.0, decode=0.0,
        requests=0, cost=1.0,
    )  # fmt: skip


def placed(request: str = "a", **fields: Any) -> SeenRequest:
    seen = SeenRequest(request, NOW)
    decision = Decision(
        request=request, model="m", time=NOW + 1, router="r-1", policy="kv", chosen=rank("w"),
        candidates=[], tokens=100, sequence_hashes=b"", max_tokens=9, block_size=16,
        hints=Hints(session="t\x1fs"), wait_s=0.75, index_s=0.25, **fields,
    )  # fmt: skip
    seen.decisions = [decision]
    seen.instance, seen.state, seen.turn = "w-1", "decode", 1
    return seen


def ended(start: float, end: float, cache: CacheAccount | None = None) -> SeenRequest:
    seen = placed(f"r{start:g}")
    seen.arrived, seen.state = start, "ended"
    seen.outcome = Outcome(
        request=seen.request, instance="w-1", time=end, cached_tokens=0, output_tokens=7,
        ttft_s=0.5 * (end - start), total_s=end - start, finish="stop", cache=cache,
        session="t\x1fs", prompt_tokens=100, prepare_s=0.25, route_s=0.75, wait_s=0.25,
        index_s=0.25,
    )  # fmt: skip
    return seen


ACCOUNT = CacheAccount(
    prompt_tokens=100, own=45, new=25,
    losses=[
        CacheLoss(first=45, tokens=10, reason="evicted"),
        CacheLoss(first=55, tokens=20, reason="diverged"),
    ],
)  # fmt: skip


def texts(view: Any, row: Any) -> dict[str, str]:
    return {column.name: column.text(getattr(row, column.name)) for column in view.columns}


def test_a_running_row_has_its_expected_share_and_its_age() -> None:
    (row,) = running_rows([placed()], NOW + 2.5)
    shown = texts(RUNNING_VIEW, row)
    assert (shown["age_s"], shown["expected"], shown["session"]) == ("2.5 s", "80.0%", "s")
    (waiting,) = running_rows([SeenRequest("b", NOW)], NOW - 1)
    shown = texts(RUNNING_VIEW, waiting)
    assert (shown["age_s"], shown["prompt_tokens"], shown["expected"]) == ("0.0 s", "", "")


def test_an_ended_row_tells_counted_tokens_from_those_that_are_not() -> None:
    seen = ended(NOW, NOW + 2, ACCOUNT)
    (row,) = ended_rows([seen, placed()])
    shown = texts(ENDED, row)
    assert (shown["total_s"], shown["cached_tokens"], shown["lost_tokens"]) == ("2.00 s", "", "30")


def test_a_turn_names_its_reasons_the_largest_first() -> None:
    of_ended, of_running = turn_rows([ended(NOW, NOW + 2, ACCOUNT), placed()])
    shown = texts(TURNS, of_ended)
    assert (shown["reused"], shown["lost"], shown["new"]) == ("45", "30", "25")
    assert shown["lost_for"].startswith("after a change of the prompt; evicted")
    shown = texts(TURNS, of_running)
    assert (shown["total_s"], shown["reused"], shown["lost_for"]) == ("", "", "")


def test_a_turn_shows_what_was_expected_after_it_and_told_its_worker() -> None:
    expected = ExpectedReturn(
        after=f"r{NOW:g}", instance="w-1", rank=0, ended=NOW + 2, pause_s=3.0, since=NOW + 2,
        rates=pack_rates([1.0] * 16), by="class",
    )  # fmt: skip
    first, second = turn_rows([ended(NOW, NOW + 2), placed("next", expected=expected)])
    assert first.expected == "100% in 10 s, 100% in 1 min, 100% in 10 min, half in 693.1 ms"
    assert (first.forecast, second.expected, second.forecast) == ("as learned", "", "")


def test_bars_have_their_share_their_losses_and_the_waits_between_them() -> None:
    turns = [ended(NOW, NOW + 2, ACCOUNT), ended(NOW + 5, NOW + 6), placed("live")]
    turns[2].arrived = NOW + 6.5
    bars, gaps = lane_bars([[], turns], NOW - 60, NOW + 10)
    assert [bar.shade for bar in bars] == [2, UNKNOWN, RUNNING]
    assert [bar.lost for bar in bars] == [True, False, False]
    assert [(bar.lane, bar.start - NOW, bar.end - NOW) for bar in bars] == [
        (1, 0, 2), (1, 5, 6), (1, 6.5, 10),
    ]  # fmt: skip
    assert gaps == [TurnGap(1, NOW + 2, NOW + 5), TurnGap(1, NOW + 6, NOW + 6.5)]
    text = turn_text(turns[0], turns, NOW)
    assert "reused 45, lost 30, new 25\n  lost 20: after a change" in text
    assert "after the end" not in text
    assert "3.00 s after the end of the turn before it" in turn_text(turns[1], turns, NOW)


def test_turns_at_once_have_no_wait_between_them() -> None:
    turns = [ended(NOW, NOW + 9), ended(NOW + 1, NOW + 2), ended(NOW + 10, NOW + 11)]
    _, gaps = lane_bars([turns], NOW, NOW + 20)
    assert gaps == [TurnGap(0, NOW + 9, NOW + 10)]


def test_only_turns_of_the_window_are_drawn_and_of_many_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bars_module, "MOST_BARS", 4)
    turns = [ended(NOW + n, NOW + n + 0.5) for n in range(10)]
    bars, _ = lane_bars([turns, turns], NOW + 5, NOW + 10)
    assert [(bar.lane, bar.start - NOW) for bar in bars] == [(0, 8), (0, 9), (1, 8), (1, 9)]
    assert len(lane_bars([turns], NOW + 9.8, NOW + 10)[0]) == 0
    assert lane_bars([], NOW, NOW) == ([], [])


def test_no_text_of_a_caller_is_unbounded_or_breaks_a_line() -> None:
    seen = ended(NOW, NOW + 1)
    seen.request = "x\n\x1b" * 10_000
    text = turn_text(seen, [seen], NOW + 2)
    assert len(text) <= bars_module.MOST_TEXT
    assert text.splitlines()[0].startswith("turn 1: x\\n\\x1bx")


def test_the_parts_of_an_ended_request_add_up_and_name_their_processes() -> None:
    seen = ended(NOW, NOW + 4)
    parts = request_parts(seen, NOW + 99, "f-1")
    assert sum(part.seconds or 0.0 for part in parts) == pytest.approx(4.0)
    assert [(part.name, part.process, part.seconds) for part in parts] == [
        ("prepare", "f-1", 0.25),
        ("router's queue", "r-1", 0.25),
        ("index", "indexer", 0.25),
        ("route", "r-1", 0.25),
        ("engine's queue", "w-1", None),
        ("prefill", "w-1", 1.0),
        ("decode", "w-1", 2.0),
    ]


def test_the_prompt_of_a_disaggregated_request_is_computed_elsewhere() -> None:
    seen = placed(prefill=rank("p"))
    seen.state = "prefill"
    assert request_parts(seen, NOW + 3, "f")[-1][1:] == ("p-1", 2.0)
    seen.state = "decode"
    assert request_parts(seen, NOW + 3, "f")[-1].process == "w-1"
    waiting = request_parts(SeenRequest("b", NOW), NOW + 3, "f")
    assert [tuple(part) for part in waiting] == [("router's queue", "router", 3.0)]


def test_a_shared_value_is_computed_once_in_a_while() -> None:
    now, computed = 0.0, 0

    def compute() -> int:
        nonlocal computed
        computed += 1
        return computed

    shared = Shared(compute, lambda: now)
    assert [shared(), shared()] == [1, 1]
    now = 1.0
    assert [shared(), shared()] == [2, 2]
