"""The forecaster: what counts as a return, which forecasts it makes, and its bounds."""

import struct
from math import inf, isfinite, nan
from random import Random

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import (
    Candidate,
    Decision,
    Hints,
    Outcome,
    PrefetchTerms,
    ToolEvent,
    ToolState,
)
from kvmesh.returns import forecaster as module
from kvmesh.returns.classes import ClassKey
from kvmesh.returns.forecaster import MAX_REPORTS, NO_RETURN, ReturnForecaster
from kvmesh.returns.rates import age_bin, unpack_rates
from kvmesh.returns.value import values_by_age


def prompt(*blocks: int) -> bytes:
    return struct.pack(f"<{len(blocks)}Q", *blocks)


def placed(
    request: str,
    hashes: bytes,
    time: float,
    session: str | None = None,
    router: str = "here",
    on: str = "w.1",
) -> Decision:
    chosen = Candidate(
        instance=on, worker="w", rank=2, overlap=[], prefill=0, decode=0, requests=0, cost=0
    )
    return Decision(
        request=request,
        model="m",
        time=time,
        router=router,
        policy="kv",
        chosen=chosen,
        candidates=[],
        tokens=len(hashes) * 2 + 5,
        sequence_hashes=hashes,
        max_tokens=10,
        block_size=16,
        hints=Hints(session=session),
    )


def ended(request: str, time: float, *waits: str, choice: int = 0) -> Outcome:
    return Outcome(
        request=request,
        instance="w.1",
        time=time,
        cached_tokens=0,
        output_tokens=100,
        ttft_s=None,
        total_s=1.0,
        finish="stop",
        choice=choice,
        waits_for=list(waits),
    )


def turn(
    core: ReturnForecaster, request: str, hashes: bytes, time: float, *waits: str, session: str = ""
) -> None:
    core.on_placed(placed(request, hashes, time, session or None), time)
    core.on_finished(ended(request, time + 1, *waits), time + 1)


def test_a_turn_that_ended_gets_one_forecast() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2, 3), 100.0, "human")
    [(instance, forecast)] = core.take_forecasts(101.0)
    assert instance == "w.1"
    assert (forecast.request, forecast.rank, forecast.since) == ("r1", 2, 101.0)
    assert unpack_rates(forecast.rates)[0] > 0
    assert core.take_forecasts(102.0) == []


def test_only_the_router_that_placed_a_request_sends() -> None:
    core = ReturnForecaster("here")
    core.on_placed(placed("r1", prompt(1), 100.0, router="there"), 100.0)
    core.on_finished(ended("r1", 101.0), 101.0)
    assert core.take_forecasts(101.0) == []


def test_a_prompt_that_contains_a_turn_is_its_return() -> None:
    core = ReturnForecaster("here")
    for number in range(50):
        base = number * 10 + 1000
        turn(core, f"a{number}", prompt(base, base + 1), number * 100.0, "tool", "Bash")
        turn(core, f"b{number}", prompt(base, base + 1, base + 2), number * 100.0 + 7, "human")
    found = {each.waits: each for each in core.curves.summaries()}
    assert found["tool", "Bash"].returned == pytest.approx(50, rel=0.2)
    assert found["human",].returned == 0
    rates = found["tool", "Bash"].rates
    assert rates[age_bin(6.0)] > 10 * rates[age_bin(3.0)]
    assert rates[age_bin(6.0)] > 10 * found["human",].rates[age_bin(6.0)]


def test_pauses_end_when_the_next_request_arrives() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0)
    waited = replace(placed("r2", prompt(1, 2, 3), 160.0), wait_s=50.0, index_s=1.0)
    core.on_placed(waited, 160.0)
    assert core._running["r2"].pause_s == 8.0
    [summary] = core.curves.summaries()
    assert summary.returned == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("wait_s", [nan, inf, -5.0, 1e300])
def test_an_absurd_wait_harms_nobody(wait_s: float) -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0)
    core.on_placed(replace(placed("r2", prompt(1, 2, 3), 160.0), wait_s=wait_s), 160.0)
    core.on_finished(ended("r2", 161.0), 161.0)
    forecasts = core.take_forecasts(162.0)
    assert all(isfinite(r) for _, each in forecasts for r in unpack_rates(each.rates))
    rates = core.curves.rates(core.curves.tables([ClassKey()]))
    assert all(isfinite(rate) for rate in rates)


def test_the_second_continuation_begins_a_conversation_of_its_own() -> None:
    core = ReturnForecaster("here")
    turn(core, "system", prompt(1), 0.0)
    for number in range(2, 30):
        turn(core, f"r{number}", prompt(1, number), number * 10.0)
    [everything] = [each for each in core.curves.summaries() if not each.waits]
    assert everything.returned == pytest.approx(1.0, rel=0.1)


def test_an_unsent_forecast_of_a_prompt_that_is_back_is_dropped() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0)
    core.on_placed(placed("r2", prompt(1, 2, 3), 101.0), 101.0)
    assert core.take_forecasts(101.0) == []


def test_a_prompt_tells_what_was_expected_of_the_turn_that_it_continues() -> None:
    core = ReturnForecaster("another router")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", "Bash", session="s")
    following = replace(placed("r2", prompt(1, 2, 3), 108.0, "s", on="w.2"), wait_s=0.75)
    expected = core.expected_return(following)
    assert expected is not None
    assert (expected.after, expected.instance, expected.rank) == ("r1", "w.1", 2)
    assert (expected.ended, expected.since, expected.pause_s) == (101.0, 101.0, 6.25)
    assert expected.waits == ["tool", "Bash"]
    assert unpack_rates(expected.rates)[0] > 0
    assert expected.by == "class"
    core.on_placed(following, 108.0)
    assert core.expected_return(placed("r3", prompt(1, 2, 4), 109.0)) is None  # not the first
    assert core.expected_return(placed("r4", prompt(7), 109.0)) is None


def test_what_is_expected_by_a_report_on_a_tool_is_told_as_such() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", "Bash", session="s")
    started = ToolEvent(session="s", event="started", time=101.5, call="c", remaining_s=30.0)
    core.on_tool(started, 101.5)
    expected = core.expected_return(placed("r2", prompt(1, 2, 3), 140.0, "s"))
    assert expected is not None
    assert (expected.by, expected.since) == ("tool", 101.5)


@pytest.mark.parametrize("session", ["s", None])
def test_a_session_that_goes_on_elsewhere_leaves_its_forecast_behind(session: str | None) -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, session=session or "")
    assert len(core.take_forecasts(101.0)) == 1
    core.on_placed(placed("r2", prompt(1, 2, 3), 102.0, session, on="w.2"), 102.0)
    [(instance, forecast)] = core.take_forecasts(102.0)
    assert (instance, forecast.request, forecast.rank) == ("w.1", "r1", 2)
    assert forecast.rates == NO_RETURN
    core.on_finished(ended("r2", 103.0), 103.0)
    [(instance, forecast)] = core.take_forecasts(103.0)
    assert (instance, forecast.request) == ("w.2", "r2")
    assert forecast.rates != NO_RETURN


@pytest.mark.parametrize(
    ("taken", "on", "session", "router"),
    [
        (True, "w.1", "s", "here"),  # it stays: the worker sees the return itself
        (False, "w.2", "s", "here"),  # no forecast was sent
        (True, "w.2", "other", "here"),  # a fork: the session itself may still return
        (True, "w.2", "s", "there"),
    ],
)
def test_only_a_sent_forecast_of_a_session_that_moved_is_withdrawn(
    taken: bool, on: str, session: str, router: str
) -> None:
    core = ReturnForecaster(router)
    core.on_placed(placed("r1", prompt(1, 2), 100.0, "s"), 100.0)
    core.on_finished(ended("r1", 101.0), 101.0)
    if taken:
        core.take_forecasts(101.0)
    core.on_placed(placed("r2", prompt(1, 2, 3), 102.0, session, on=on), 102.0)
    assert core.take_forecasts(102.0) == []


def test_prefetches_and_further_choices_are_no_turns() -> None:
    core = ReturnForecaster("here")
    decision = placed("p", prompt(1), 1.0)
    decision = type(decision)(
        **{
            name: getattr(decision, name)
            for name in decision.__struct_fields__
            if name != "prefetch"
        },
        prefetch=PrefetchTerms(),
    )
    core.on_placed(decision, 1.0)
    core.on_finished(ended("p", 2.0), 2.0)
    core.on_placed(placed("r", prompt(2), 3.0), 3.0)
    core.on_finished(ended("r", 4.0, choice=1), 4.0)
    assert core.take_forecasts(5.0) == []


def test_a_request_that_moves_is_forecast_where_it_ended() -> None:
    core = ReturnForecaster("here")
    core.on_placed(placed("r", prompt(1), 1.0, router="there"), 1.0)
    core.on_placed(placed("r", prompt(1), 2.0), 2.0)
    core.on_finished(ended("r", 4.0), 4.0)
    assert len(core.take_forecasts(5.0)) == 1


def test_a_known_end_of_a_tool_wins_over_what_was_learned() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", "Bash", session="s")
    assert len(core.take_forecasts(101.0)) == 1
    started = ToolEvent(session="s", event="started", time=101.5, call="c", remaining_s=60.0)
    core.on_tool(started, 101.5)
    [(_, forecast)] = core.take_forecasts(102.0)
    assert forecast.since == 101.5
    rates = unpack_rates(forecast.rates)
    assert rates[age_bin(60.0)] > 100 * rates[age_bin(6.0)]
    core.on_tool(ToolEvent(session="s", event="ended", time=120.0, call="c"), 120.0)
    [(_, forecast)] = core.take_forecasts(120.0)
    assert unpack_rates(forecast.rates)[age_bin(1.0)] > 0.3


@pytest.mark.parametrize("others", ["class", "session"])
def test_beside_other_tenants_a_report_makes_no_prompt_worth_more(others: str) -> None:
    core = ReturnForecaster("here")
    other = placed("o", prompt(9), 99.0, "victim\x1fo" if others == "session" else None)
    tenant = "class" if others == "class" else None
    core.on_placed(replace(other, hints=replace(other.hints, tenant=tenant)), 99.0)
    turn(core, "r1", prompt(1, 2), 100.0, "tool", "Bash", session="evil\x1fs")
    assert len(core.take_forecasts(101.0)) == 1
    values = values_by_age(core.curves.rates(core.curves.tables([ClassKey(("tool", "Bash"))])))
    event = ToolEvent(session="evil\x1fs", event="ended", time=110.0, call="c")
    core.on_tool(event, 110.0)
    [(_, forecast)] = core.take_forecasts(110.0)
    due = values_by_age(unpack_rates(forecast.rates))
    for later in (0.0, 1.0, 5.0, 60.0):
        assert due[age_bin(later)] <= 1.05 * max(values[age_bin(9.0 + later) :])
    core.on_tool(replace(event, event="started", time=111.0, remaining_s=3600.0), 111.0)
    for _, forecast in core.take_forecasts(111.0):  # it may still give its own prompt up
        assert values_by_age(unpack_rates(forecast.rates))[0] < 0.1 * values[age_bin(10.0)]
    core.on_tool(replace(event, time=3000.0), 3000.0)  # the others have long left
    [(_, forecast)] = core.take_forecasts(3000.0)
    assert unpack_rates(forecast.rates)[age_bin(1.0)] > 0.3


def test_a_tool_reported_before_the_end_of_its_turn_counts() -> None:
    core = ReturnForecaster("here")
    core.on_placed(placed("r1", prompt(1, 2), 100.0, "s"), 100.0)
    core.on_tool(ToolEvent(session="s", event="started", time=100.9, remaining_s=30.0), 100.9)
    core.on_finished(ended("r1", 101.0, "tool", "Bash"), 101.0)
    [(_, forecast)] = core.take_forecasts(101.0)
    rates = unpack_rates(forecast.rates)
    assert rates[age_bin(30.0)] > 50 * rates[age_bin(3.0)]


def test_a_tool_changes_nothing_for_other_sessions_or_returned_prompts() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", session="s")
    assert len(core.take_forecasts(101.0)) == 1
    core.on_tool(ToolEvent(session="t", event="started", time=101.5, remaining_s=60.0), 101.5)
    assert core.take_forecasts(102.0) == []
    core.on_placed(placed("r2", prompt(1, 2, 3), 103.0, "s"), 103.0)
    core.on_tool(ToolEvent(session="s", event="ended", time=103.5), 103.5)
    assert core.take_forecasts(104.0) == []


def test_a_clock_ahead_of_ours_is_not_believed() -> None:
    core = ReturnForecaster("here")
    core.on_placed(placed("r1", prompt(1, 2), 1e12), 100.0)
    core.on_finished(ended("r1", 1e12), 101.0)
    [(_, forecast)] = core.take_forecasts(101.0)
    assert forecast.since == 101.0


def test_a_report_from_a_clock_ahead_is_not_one_on_later_turns() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", session="s")
    core.on_tool(ToolEvent(session="s", event="ended", time=1e12), 102.0)
    assert [each.since for _, each in core.take_forecasts(102.0)] == [102.0]
    turn(core, "r2", prompt(1, 2, 3), 103.0, "tool", session="s")
    assert [each.since for _, each in core.take_forecasts(105.0)] == [104.0]


@pytest.mark.parametrize("behind_s", [0.0, 0.5, 30.0, 1e9])
def test_a_report_from_a_clock_behind_is_one_on_the_latest_turn(behind_s: float) -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", session="s")
    core.on_tool(ToolEvent(session="s", event="ended", time=103.0 - behind_s), 103.0)
    [(_, forecast)] = core.take_forecasts(103.0)
    assert 102.0 <= forecast.since <= 103.0


def test_reports_without_end_do_not_keep_a_prompt() -> None:
    core, sent = ReturnForecaster("here"), 0
    turn(core, "r1", prompt(1, 2), 100.0, "tool", session="s")
    for number in range(2000):
        now = 102.0 + number
        event: ToolState = "progress" if number < 1000 else "ended"
        core.on_tool(
            ToolEvent(session="s", event=event, time=now, call=str(number), remaining_s=0.0), now
        )
        sent += len(core.take_forecasts(now))
        if number == 999:
            assert sent == MAX_REPORTS // 2
    assert sent == MAX_REPORTS
    turn(core, "r2", prompt(1, 2, 3), 3000.0, "tool", session="s")
    core.on_tool(ToolEvent(session="s", event="ended", time=3002.0), 3002.0)
    assert len(core.take_forecasts(3002.0)) == 1


def test_an_end_may_arrive_before_its_placement() -> None:
    core = ReturnForecaster("here")
    core.on_finished(ended("r1", 101.0, "tool"), 101.0)
    core.on_placed(placed("r1", prompt(1, 2), 100.0, "s"), 101.1)
    core.on_tool(ToolEvent(session="s", event="ended", time=102.0), 102.0)
    assert [each.request for _, each in core.take_forecasts(102.0)] == ["r1"]


def test_reports_that_change_nothing_do_not_count() -> None:
    core = ReturnForecaster("here")
    turn(core, "r1", prompt(1, 2), 100.0, "tool", session="s")
    assert len(core.take_forecasts(101.0)) == 1
    for number in range(2 * MAX_REPORTS):  # without an estimate
        core.on_tool(ToolEvent(session="s", event="started", time=102.0 + number), 102.0 + number)
    assert core.take_forecasts(400.0) == []
    core.on_tool(ToolEvent(session="s", event="ended", time=400.0), 400.0)
    assert len(core.take_forecasts(400.0)) == 1


@pytest.mark.parametrize("time", [nan, inf, -inf, -1e300])
def test_malformed_events_harm_nobody(time: float) -> None:
    core = ReturnForecaster("here")
    core.on_placed(placed("odd", b"12345", 100.0), 100.0)
    core.on_placed(placed("r0", prompt(1), time), 100.0)
    core.on_finished(ended("r0", time, *["x" * 1000] * 50), 100.0)
    core.on_tool(ToolEvent(session="s", event="started", time=time, remaining_s=-1e300), 100.0)
    core.on_tool(ToolEvent(session="s", event="started", time=100.0, remaining_s=1e300), 100.0)
    turn(core, "r1", prompt(2), 100.0, "tool", session="s")
    forecasts = {each.request: each for _, each in core.take_forecasts(101.0)}
    assert forecasts["r1"].since == 101.0
    assert all(isfinite(rate) for rate in unpack_rates(forecasts["r1"].rates))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("MAX_TURNS", 50), ("MAX_RUNNING", 20), ("MAX_UNSENT", 10)):
        monkeypatch.setattr(module, name, bound)
    core, rng = ReturnForecaster("here"), Random(1)
    for number in range(300):
        hashes = prompt(*(rng.getrandbits(64) for _ in range(3)))
        core.on_placed(placed(f"r{number}", hashes, float(number), f"s{number}"), float(number))
        if number % 2:
            core.on_finished(ended(f"r{number}", number + 0.5, "tool", str(number)), number + 0.5)
    assert len(core) <= 50 + 20
    assert len(core.take_forecasts(300.0)) == 10


def test_equal_events_give_equal_forecasts() -> None:
    sent = []
    for _ in range(2):
        core, rng = ReturnForecaster("here"), Random(7)
        for number in range(200):
            base = rng.getrandbits(63)
            turn(core, f"a{number}", prompt(base, base + 1), number * 5.0)
            if rng.random() < 0.5:
                turn(core, f"b{number}", prompt(base, base + 1, base + 2), number * 5.0 + 2)
        sent.append([forecast for _, forecast in core.take_forecasts(2000.0)])
    assert sent[0] == sent[1]
