"""Reports of harnesses on tools: the end of the last one, and rates around it."""

from math import inf, nan

import pytest

from kvmesh.bus.messages import ToolEvent
from kvmesh.returns.rates import AGE_ENDS, age_bin, pack_rates, share_returned, unpack_rates
from kvmesh.returns.tool_calls import (
    MAX_CALLS,
    MAX_KNOWN,
    MAX_SESSIONS,
    ReportedTools,
    at_most_learned,
    due_rates,
)
from kvmesh.returns.value import values_by_age


def started(time: float, remaining_s: float | None, call: str = "a") -> ToolEvent:
    return ToolEvent(session="s", event="started", time=time, call=call, remaining_s=remaining_s)


def test_the_end_is_that_of_the_last_tool() -> None:
    calls = ReportedTools()
    assert calls.end("s", 0.0) is None
    calls.apply(started(10.0, 60.0))
    calls.apply(started(10.0, 5.0, "b"))
    assert calls.end("s", 9.0) == 70.0
    calls.apply(ToolEvent(session="s", event="progress", time=20.0, call="a", remaining_s=10.0))
    assert calls.end("s", 9.0) == 30.0
    calls.apply(ToolEvent(session="s", event="ended", time=22.0, call="a"))
    assert calls.end("s", 9.0) == 22.0


def test_progress_without_an_estimate_keeps_the_known_end() -> None:
    calls = ReportedTools()
    calls.apply(started(10.0, 60.0))
    calls.apply(ToolEvent(session="s", event="progress", time=20.0, call="a"))
    assert calls.end("s", 0.0) == 70.0


@pytest.mark.parametrize("remaining_s", [None, inf, nan])
def test_a_tool_of_unknown_length_makes_the_end_unknown(remaining_s: float | None) -> None:
    calls = ReportedTools()
    calls.apply(started(10.0, 60.0))
    calls.apply(started(10.0, remaining_s, "b"))
    assert calls.end("s", 0.0) is None


def test_tools_of_earlier_turns_do_not_count() -> None:
    calls = ReportedTools()
    calls.apply(started(10.0, 60.0))
    assert calls.end("s", 11.0) is None


def test_sessions_and_calls_are_bounded() -> None:
    calls = ReportedTools()
    for number in range(MAX_SESSIONS + 5):
        calls.apply(ToolEvent(session=str(number), event="started", time=1.0, remaining_s=1.0))
    assert calls.end("0", 0.0) is None
    assert calls.end(str(MAX_SESSIONS), 0.0) == 2.0
    for number in range(MAX_CALLS + 5):
        calls.apply(started(1.0, 1000.0 - number, str(number)))
    assert calls.end("s", 0.0) == 1.0 + 995.0


def test_the_calls_of_all_sessions_are_bounded_together() -> None:
    calls, sessions = ReportedTools(), 2 * MAX_KNOWN // MAX_CALLS
    for number in range(sessions * MAX_CALLS):
        session, call = str(number // MAX_CALLS), str(number % MAX_CALLS)
        calls.apply(ToolEvent(session=session, event="ended", time=1.0, call=call))
        calls.apply(ToolEvent(session=session, event="ended", time=1.0, call=call))
    assert calls.known == MAX_KNOWN
    assert calls.end("0", 0.0) is None
    assert calls.end(str(sessions - 1), 0.0) == 1.0


@pytest.mark.parametrize("remaining_s", [0.0, 5.0, 60.0, 3600.0])
def test_rates_of_a_known_end_concentrate_around_it(remaining_s: float) -> None:
    rates = unpack_rates(pack_rates(due_rates(remaining_s)))
    early, late = AGE_ENDS[age_bin(remaining_s / 4)], AGE_ENDS[age_bin(2 * (remaining_s + 1))]
    assert share_returned(rates, early) < 0.15 or not remaining_s
    assert share_returned(rates, late) > 0.85
    values = values_by_age(rates)
    if remaining_s:
        assert max(values) > values[0]


@pytest.mark.parametrize("age_s", [0.0, 0.3, 7.0, 100.0, 1e6])
@pytest.mark.parametrize("remaining_s", [0.0, 5.0, 600.0])
def test_a_bounded_report_is_at_no_age_worth_more_than_what_was_learned(
    age_s: float, remaining_s: float
) -> None:
    learned = [0.02, 0.0, 0.5, 0.1, 0.3, 0.05, 0.4, *(0.01 / 2**k for k in range(9))]
    reported = due_rates(remaining_s)
    bounded = at_most_learned(reported, learned, age_s)
    assert all(one <= other for one, other in zip(bounded, reported, strict=True))
    for later in (0.0, 0.2, 0.6, 3.0, 9.0, 77.0, 5000.0, 1e5):
        assert bounded[age_bin(later)] <= learned[age_bin(age_s + later)]
        value = values_by_age(bounded)[age_bin(later)]
        assert value <= values_by_age(learned)[age_bin(age_s + later)] + 1e-9
    if not age_s:
        assert bounded == [min(each) for each in zip(reported, learned, strict=True)]


def test_a_tenant_with_many_reports_drops_none_of_another() -> None:
    calls = ReportedTools()
    calls.apply(ToolEvent(session="victim\x1fs", event="started", time=1.0, remaining_s=9.0))
    for number in range(MAX_SESSIONS + 5):
        name = f"evil/part-{number}\x1f{number}"
        calls.apply(ToolEvent(session=name, event="started", time=1.0, remaining_s=1.0))
    for number in range(MAX_KNOWN):
        name = f"evil\x1f{number // MAX_CALLS}"
        calls.apply(ToolEvent(session=name, event="ended", time=1.0, call=str(number)))
    assert calls.known <= MAX_KNOWN
    assert calls.end("victim\x1fs", 0.0) == 10.0
