"""Forecasts by request: early, late, repeated, malformed and too many; ends of what they expect."""

from math import inf, nan

import pytest

from kvmesh.bus.messages import ReturnForecast
from kvmesh.retention.awaited_prompts import (
    MAX_EARLY,
    MAX_EXPECTED,
    MAX_PER_SESSION,
    AwaitedPrompt,
    AwaitedPrompts,
    Expectation,
    chance_of_return,
    on_clock,
    still_expected,
    with_expectation,
)
from kvmesh.returns.rates import BINS, pack_rates

SOON, NEVER = pack_rates([1.0] * BINS), pack_rates([0.0] * BINS)


def forecast(request: str, rates: bytes = SOON, since: float = 0.0) -> ReturnForecast:
    return ReturnForecast(request, 0, since, rates)


def prompt(request: str, session: str | None = "s", blocks: int = 3) -> AwaitedPrompt[str]:
    return AwaitedPrompt(request, session, blocks, blocks, f"place of {request}")


def awaited(max_prompts: int = 100, max_blocks: float = inf) -> AwaitedPrompts[str]:
    return AwaitedPrompts(max_prompts, max_blocks)


def test_a_forecast_names_an_ended_request_or_waits_for_its_end() -> None:
    prompts = awaited()
    ended, early = prompt("r-1"), prompt("r-2")
    assert not prompts.end(ended)
    assert prompts.expect(forecast("r-1")) is ended
    assert prompts.expect(forecast("r-2", NEVER)) is None
    assert prompts.end(early)
    assert early.expectation is not None
    assert early.expectation.values == (0.0,) * BINS
    assert prompts.results == {"applied": 2, "unknown": 1, "malformed": 0}


def test_a_later_forecast_replaces_the_former_one_in_place() -> None:
    prompts = awaited()
    prompts.end(prompt("r-1"))
    first = prompts.expect(forecast("r-1"))
    assert first is not None
    before = first.expectation
    assert prompts.expect(forecast("r-1", NEVER, since=5.0)) is first
    assert first.expectation is before is not None
    assert (before.since, before.values) == (5.0, (0.0,) * BINS)


def test_a_forecast_without_any_rate_withdraws() -> None:
    prompts = awaited()
    prompts.end(prompt("r-1"))
    prompts.expect(forecast("r-1"))
    prompts.expect(forecast("r-1", NEVER))
    prompts.on_prompt("s", [range(1, 4)])
    assert prompts.returns == {"held": 0, "evicted": 0}


def test_a_value_is_that_of_the_age_until_the_prompt_returns() -> None:
    values = tuple(float(BINS - k) for k in range(BINS))
    expectation = Expectation(10.0, values)
    assert [expectation.value(now) for now in (3.0, 10.4, 10.6, 1e9)] == [16.0, 16.0, 15.0, 1.0]
    expectation.over = True
    assert expectation.value(10.6) == 0.0


def test_a_forecast_from_the_beginning_of_time_has_a_value() -> None:
    prompts = awaited()
    prompts.end(prompt("r-1"))
    found = prompts.expect(forecast("r-1", since=-1.7e308))
    assert found is not None
    assert found.expectation is not None
    assert found.expectation.value(1e9) > 0.0


@pytest.mark.parametrize(
    "bad",
    [forecast("r-1", b""), forecast("r-1", b"x" * 17), forecast("r-1", since=nan)],
)
def test_a_malformed_forecast_is_counted_and_logged_once(
    bad: ReturnForecast, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = awaited()
    prompts.end(prompt("r-1"))
    for _ in range(3):
        assert prompts.expect(bad) is None
        assert prompts.expect(ReturnForecast("unknown", 0, bad.since, bad.rates)) is None
    assert prompts.results["malformed"] == 6
    assert len(caplog.records) == 1
    assert not prompts._early


def test_thousands_of_forecasts_and_prompts_are_bounded() -> None:
    prompts = awaited(max_prompts=50, max_blocks=90)
    for number in range(3 * MAX_EARLY):
        prompts.expect(forecast(f"unknown-{number}"))
        prompts.end(prompt(f"r-{number}", f"s-{number % 7}"))
    assert len(prompts._early) == MAX_EARLY
    assert len(prompts) == 30  # of 3 blocks each
    assert sum(len(of) for of in prompts._by_session.values()) == 30
    wide = awaited(max_prompts=10 * MAX_PER_SESSION)
    for number in range(5 * MAX_PER_SESSION):
        wide.end(prompt(f"r-{number}"))
    assert len(wide) == MAX_PER_SESSION


def test_a_prompt_returns_in_one_that_continues_it() -> None:
    prompts = awaited()
    for name, session in (("r-1", "s"), ("r-2", "other")):
        prompts.end(prompt(name, session))
        assert prompts.expect(forecast(name)) is not None
    (one,) = prompts._by_session["s"].values()
    (other,) = prompts._by_session["other"].values()
    first, second = one.expectation, other.expectation
    assert first is not None
    assert second is not None
    prompts.on_prompt("s", [[1, 2]])
    prompts.on_prompt("s", [[1, 2, 9, 4]])
    prompts.on_prompt(None, [[1, 2, 3]])
    assert (len(prompts), prompts.returns) == (2, {"held": 0, "evicted": 0})
    prompts.on_prompt("s", [[5], [1, 2, 3, 4]])
    assert [expectation.over for expectation in (first, second)] == [True, False]
    second.evicted = 2
    prompts.on_prompt("other", [[1, 2, 3]])
    assert prompts.returns == {"held": 1, "evicted": 1}
    assert len(prompts) == 0
    assert prompts.expect(forecast("r-1")) is None, "it has returned"


def test_nothing_is_expected_of_a_released_session() -> None:
    prompts = awaited()
    prompts.end(prompt("r-1"))
    one = prompts.expect(forecast("r-1"))
    prompts.release(["s", "unknown"])
    assert one is not None
    assert one.expectation is not None
    assert one.expectation.over
    assert prompts.returns == {"held": 0, "evicted": 0}


def test_a_request_that_ends_twice_counts_once() -> None:
    prompts = awaited()
    for blocks in (3, 5):
        prompts.end(prompt("r-1", blocks=blocks))
    assert (len(prompts), prompts._blocks) == (1, 5)


def test_of_too_many_expectations_the_lowest_is_dropped() -> None:
    def of(value: float) -> Expectation:
        return Expectation(0.0, (value,) * BINS)

    some = [of(float(value)) for value in (3, 1, 2, 4)]
    assert len(some) == MAX_EXPECTED
    new = of(0.5)
    kept = with_expectation(some, new, 1.0)
    assert [one.values[0] for one in kept] == [3.0, 2.0, 4.0, 0.5]
    assert with_expectation(kept, new, 1.0) == kept
    kept[0].over = True
    assert [one.values[0] for one in still_expected(kept)] == [2.0, 4.0, 0.5]
    assert [one.values[0] for one in with_expectation(kept, of(9.0), 1.0)] == [2.0, 4.0, 0.5, 9.0]


def test_times_are_converted_and_never_lie_ahead() -> None:
    past, ahead = on_clock(
        [forecast("a", since=995.0), forecast("b", since=1_005.0)], 1_000.0, 40.0
    )
    assert (past.since, ahead.since) == (35.0, 40.0)


def test_more_of_a_prompt_is_expected_as_its_part_was() -> None:
    prompts = awaited()
    prompts.grow(prompt("r-1", blocks=2))
    assert prompts.expectation("r-1") is None
    prompts.expect(forecast("r-1"))
    known = prompts.expectation("r-1")
    prompts.grow(prompt("r-1", blocks=3))
    assert prompts.expectation("r-1") is known is not None
    prompts.on_prompt("s", [[1, 2, 3]], request="r-1")
    assert not known.over
    prompts.on_prompt("s", [[1, 2, 3, 4]], request="r-2")
    assert prompts.returns["held"] == 1
    assert prompts.expectation("r-1") is None


def test_an_early_forecast_applies_to_the_first_part() -> None:
    prompts = awaited()
    prompts.expect(forecast("r-1"))
    assert prompts.grow(prompt("r-1", blocks=2))
    assert not prompts.grow(prompt("r-1", blocks=3))
    assert prompts.expectation("r-1") is not None


def test_the_chance_of_a_return_is_that_of_any_of_several() -> None:
    half = Expectation(0.0, (0.1,) * BINS, (0.5,) * BINS)
    over = Expectation(0.0, (0.1,) * BINS, (0.5,) * BINS)
    over.over = True
    assert chance_of_return((), 1.0) == 1.0
    assert chance_of_return((half, over), 1.0) == 0.5
    assert chance_of_return((half, half), 1.0) == 0.75
