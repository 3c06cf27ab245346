"""The learned speeds step back when they expect the times of requests worse than equal ones."""

from random import Random

import msgspec
import numpy as np
import pytest
from support.routing import Placement, overlaps, request, sequence, worker

from kvmesh.bus.messages import Decision, Outcome
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.state.rank_speeds import StepSeconds
from kvmesh.settings.schema import RouterSettings

SECONDS = StepSeconds(prompt_token=1e-4, step=0.01, chunk=1000.0)


def core_with(slowness: list[float], learn_speeds: bool = True) -> RouterCore:
    core = RouterCore("m", "router", RouterSettings(learn_speeds=learn_speeds), Random(0))
    for name in ("a", "b"):
        core.join(worker(name, ranks=1))
    core.speeds.slowness = np.array(slowness)
    core.speeds.seconds = SECONDS
    core.speeds.compared = 10
    core.speeds._costs.seconds = np.array([SECONDS.step, SECONDS.prompt_token, 0.0, 0.0, 0.0, 0.0])
    return core


def placed(core: RouterCore, name: str, instance: str) -> Decision:
    asked = request(name, sequence(*range(10)))
    asked = msgspec.structs.replace(
        asked, placement=msgspec.structs.replace(asked.placement, instance=instance)
    )
    decision = core.decide(asked, None, 1.0)
    core.learn(decision, 1.0)
    return decision


def ended(core: RouterCore, decision: Decision, times: float) -> None:
    """The end of a request that took so many times as long as on a rank of median speed."""
    first_s = decision.tokens * SECONDS.prompt_token + SECONDS.step
    outcome = Outcome(
        request=decision.request,
        instance=decision.chosen.instance,
        time=2.0,
        cached_tokens=0,
        output_tokens=11,
        ttft_s=first_s * times,
        total_s=(first_s + 10 * SECONDS.step) * times,
        finish="stop",
    )
    core.learn(outcome, 2.0)


@pytest.mark.parametrize(("times", "trusted"), [(3.0, True), (1.0, False)])
def test_speeds_count_while_they_expect_times_better(times: float, trusted: bool) -> None:
    core = core_with([3.0, 1.0])
    for n in range(20):
        ended(core, placed(core, str(n), "a"), times)
    slots = core.table.eligible(request("x", b"").placement, None, "all")
    assert (core.speeds.factors(slots) is not None) is trusted
    [report] = [each for each in core.learning.reports("m") if each.learner == "speeds"]
    assert report.on is trusted
    assert (report.gain > 0) is trusted
    assert report.held_out == pytest.approx(20, rel=0.2)
    better, worse = (report.own, report.other) if trusted else (report.other, report.own)
    assert better == pytest.approx(1.0)
    assert worse == pytest.approx(3.0)


def test_requests_on_ranks_of_median_speed_tell_nothing() -> None:
    core = core_with([3.0, 1.0])
    ended(core, placed(core, "1", "b"), 1.0)
    [report] = [each for each in core.learning.reports("m") if each.learner == "speeds"]
    assert report.held_out == 0
    assert "no request on an unlike rank" in report.reason


def test_without_learned_speeds_there_is_no_report() -> None:
    core = core_with([1.0, 1.0], learn_speeds=False)
    assert [each for each in core.learning.reports("m") if each.learner == "speeds"] == []


def test_the_length_of_answers_is_learned() -> None:
    core = core_with([1.0, 1.0])
    ended(core, placed(core, "1", "b"), 1.0)
    assert core.speeds.answer == 11
    ended(core, placed(core, "2", "b"), 1.0)
    assert core.speeds.answer == 11


def test_a_slow_rank_costs_more_the_longer_the_answer() -> None:
    core = core_with([3.0, 1.0])
    core.speeds.answer = 100.0
    asked = request("1", sequence(*range(10)))
    costs = []
    for osl in (10, None, 1000):
        hinted = msgspec.structs.replace(asked, hints=msgspec.structs.replace(asked.hints, osl=osl))
        decision = core.decide(hinted, None, 1.0)
        assert decision.chosen.instance == "b"
        costs.append({each.instance: each.cost for each in decision.candidates})
    assert costs[0]["a"] < costs[1]["a"] < costs[2]["a"]
    assert costs[0]["b"] == costs[2]["b"]


def test_engines_that_count_no_steps_do_not_end_the_comparison() -> None:
    """A whole cached prompt is then expected to take no time."""
    core = core_with([3.0, 1.0])
    core.speeds.seconds = StepSeconds(prompt_token=1e-4, step=0.0, chunk=1000.0)
    asked = request("x", sequence(*range(10)), placement=Placement(instance="a"))
    decision = core.decide(asked, overlaps({"a": (10,)}), 1.0)
    core.learn(decision, 1.0)
    ended(core, decision, 1.0)
    assert core.learning._speed_trial.errors.count == 1.0
