"""Requests as routers and frontends report them, in any order and any number of times."""

import math
from random import Random

import pytest
from msgspec.structs import replace
from support.planned_model import BLOCK, START, decision, freed, outcome, placed, wait

from kvmesh.bus.messages import PrefetchTerms, SeqPrefilled
from kvmesh.planner.core.arrivals import LoadSeries
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.core.scenario import ENOUGH, MOST_SHAPES, scenario
from kvmesh.planner.core.traffic import (
    MOST_REQUESTS,
    MOST_WAITING,
    OUTPUT_GUESS,
    MeasuredShare,
    ObservedTraffic,
)

TTFT = Promise("ttft", 0.9, 1.0)


def traffic() -> ObservedTraffic:
    return ObservedTraffic(1800.0)


def test_a_request_counts_once_whatever_shows_it_first() -> None:
    one = traffic()
    assert one.on_sequence(wait("a", START)) is not None
    assert one.on_sequence(wait("a", START)) is None
    assert one.on_route(decision("a", START + 1, wait_s=1.0)) is None
    assert one.on_route(decision("a", START + 1)) is None
    other = traffic()
    arrival = other.on_route(decision("a", START + 1, overlap=10, wait_s=1.0))
    assert arrival is not None
    assert (arrival.at, arrival.uncached) == (START, 4096 - 10 * BLOCK)
    assert other.on_sequence(wait("a", START)) is None
    assert other.on_sequence(placed("a")) is None
    assert other.waiting == 0


def test_prefetches_and_further_attempts_are_no_arrivals() -> None:
    one = traffic()
    assert one.on_route(replace(decision("a", START), prefetch=PrefetchTerms())) is None
    assert one.on_route(replace(decision("b", START), attempt=1)) is None
    assert one.latest(10) == []


def test_the_end_of_an_unknown_request_changes_nothing() -> None:
    one = traffic()
    for event in (freed("x"), placed("x"), SeqPrefilled("x")):
        assert one.on_sequence(event) is None
    assert one.on_route(outcome("x", START, output=100_000)) is None
    assert (one.waiting, one.waiting_tokens, one.mean_output) == (0, 0, OUTPUT_GUESS)


def test_an_outcome_before_its_decision_leaves_the_results_unknown() -> None:
    one = traffic()
    one.on_route(outcome("a", START))
    assert one.on_route(decision("a", START)) is not None
    (request,) = one.latest(1)
    assert (request.output, request.ttft) == (-1, -1.0)
    assert one.shape(request, 0.0).output == int(OUTPUT_GUESS)


def test_engines_count_the_cached_tokens_better_than_routers() -> None:
    one = traffic()
    one.on_route(decision("a", START, overlap=10))
    one.on_route(outcome("a", START, cached=4000))
    assert one.latest(1)[0].uncached == 96
    one.on_route(outcome("a", START, cached=10_000))  # more than the prompt
    assert one.latest(1)[0].uncached == 1


def test_prompts_that_another_worker_had_cached_are_no_load_of_a_new_one() -> None:
    other = replace(decision("x", START, overlap=50).chosen, instance="other")
    for joined, uncached in ((START - 10, 4096 - 50 * BLOCK), (START - 1000, 4096 - 10 * BLOCK)):
        one = traffic()
        placed_on = decision("a", START, overlap=10)
        one.joined(placed_on.chosen.instance, joined)
        one.on_route(replace(placed_on, candidates=[placed_on.chosen, other]))
        (request,) = one.latest(1)
        assert one.shape(request, 0.0).uncached == uncached
        assert one.shape(request, 0.0, cold=True).uncached == 4096 - 10 * BLOCK
        one.left(placed_on.chosen.instance)
        one.on_route(replace(decision("b", START + 1, overlap=10), candidates=[other]))
        assert one.shape(one.latest(1)[0], 0.0).uncached == 4096 - 10 * BLOCK


def test_waits_end_at_their_deadline_if_the_event_is_lost() -> None:
    one = traffic()
    one.on_sequence(wait("a", START, deadline_s=100))
    one.on_sequence(wait("b", START, cost=50, deadline_s=math.inf))
    assert one.oldest_wait(START + 90) == 90
    one.expire(START + 90)
    assert one.waiting_tokens == 4096 + 50
    one.expire(START + 110)
    assert one.waiting == 1
    one.expire(START + 2000)
    assert (one.waiting, one.oldest_wait(START + 2000)) == (0, 0.0)


def test_memory_is_bounded() -> None:
    one = traffic()
    for number in range(MOST_WAITING + 10):
        one.on_sequence(wait(str(number), START))
    assert one.waiting == MOST_WAITING
    assert len(one.latest(10**6)) == MOST_REQUESTS
    one.expire(START + 10_000)
    assert (one.waiting, one.latest(10)) == (0, [])


def test_a_waiting_request_beyond_the_bound_of_requests_counts_once() -> None:
    one = traffic()
    one.on_sequence(wait("a", START))
    for number in range(MOST_REQUESTS):
        one.on_route(decision(f"r-{number}", START))
    assert one.on_sequence(wait("a", START)) is None


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, START + 1e7])
def test_odd_times_count_as_now_or_are_ignored(time: float) -> None:
    one = traffic()
    for number, arrival in enumerate(
        (one.on_route(decision("a", time), START), one.on_sequence(wait("b", time), START))
    ):
        if arrival is None:
            assert time == -math.inf
        else:
            assert arrival.at == START, number
    one.on_sequence(wait("c", math.nan))
    one.expire(START + 1801)
    assert one.latest(9) == []


def test_negative_costs_and_outputs_give_shapes_of_at_least_one_token() -> None:
    one = traffic()
    one.on_sequence(wait("a", START, cost=-5))
    one.on_route(decision("b", START, tokens=0))
    one.on_route(outcome("b", START, output=0))
    assert one.waiting_tokens >= 0
    for request in one.latest(5):
        shape = one.shape(request, 0.0)
        assert (shape.uncached, shape.output) >= (1, 1)


def test_shares_are_those_of_the_requests_that_a_promise_covers() -> None:
    one, batch = traffic(), Promise("ttft", 0.9, 60.0, "", "batch")
    for number in range(20):
        one.on_route(decision(f"a{number}", START))
        one.on_route(outcome(f"a{number}", START, ttft=0.5 if number < 15 else 2.0))
        one.on_route(decision(f"b{number}", START, request_class="batch"))
        one.on_route(outcome(f"b{number}", START, ttft=30.0))
    assert one.kept(TTFT, [TTFT], 0.0, START) == MeasuredShare(15 / 40, 40)
    assert one.kept(TTFT, [TTFT, batch], 0.0, START) == MeasuredShare(0.75, 20)
    assert one.kept(batch, [TTFT, batch], 0.0, START) == MeasuredShare(1.0, 20)
    assert one.kept(TTFT, [TTFT], START + 1, START) is None


def test_a_wait_that_has_not_ended_keeps_no_promise() -> None:
    one, queue = traffic(), Promise("queue", 0.9, 1.0)
    for number in range(20):
        one.on_sequence(wait(str(number), START))
    assert one.kept(queue, [queue], 0.0, START) is None
    for number in range(10):
        one.on_route(decision(str(number), START + 5, wait_s=0.5 if number else 5.0))
    assert one.kept(queue, [queue], 0.0, START) == MeasuredShare(0.9, 10)


def filled(rate: float, seconds: float) -> tuple[ObservedTraffic, LoadSeries, float]:
    one, series, rng, at = traffic(), LoadSeries(), Random(1), START
    while (at := at + rng.expovariate(rate)) < START + seconds:
        one.on_route(decision(str(at), at, tokens=rng.randrange(100, 5000)))
        series.add(at)
    series.advance(START + seconds)
    return one, series, START + seconds


@pytest.mark.parametrize("level", [0.5, 3.0])
def test_a_scenario_has_the_level_asked_for(level: float) -> None:
    for rate, seconds in ((2.0, 900), (0.1, 1000)):
        one, series, _ = filled(rate, seconds)
        shapes = scenario(one, series, level)
        found = (len(shapes) - 1) / (shapes[-1].at - shapes[0].at)
        assert found == pytest.approx(level, rel=0.2)
        assert [shape.at for shape in shapes] == sorted(shape.at for shape in shapes)
        assert len(shapes) <= MOST_SHAPES
        assert scenario(one, series, level) == shapes


def test_few_requests_are_repeated_on_demand() -> None:
    one, series, _ = filled(0.01, 1000)
    assert 0 < len(scenario(one, series, 0.01)) < 30
    shapes = scenario(one, series, 0.01, fewest=200)
    assert len(shapes) == 200
    assert {shape.prompt for shape in shapes} == {r.prompt for r in one.latest(100)}


def test_no_level_or_no_request_gives_no_scenario() -> None:
    one, series, _ = filled(2.0, 900)
    assert scenario(one, series, 0.0) == []
    assert scenario(traffic(), series, 1.0, fewest=200) == []
    series.level = 0.0  # a forecast above a level of zero scales no gaps
    later = scenario(one, series, 1.0)
    assert len(later) > ENOUGH
    assert later[-1].at > 100
