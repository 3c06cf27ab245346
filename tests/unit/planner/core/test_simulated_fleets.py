"""Answers of an oracle in the planner's decisions: used while they fit, ignored otherwise."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from support.planned_model import PlannedModel

from kvmesh.bus.messages import FleetAnswer, FleetCandidate, FleetQuestion
from kvmesh.planner.capacity.profiled_times import ScaledProfile
from kvmesh.planner.capacity.queueing import ModelledEngine
from kvmesh.planner.core.fleets import Kept
from kvmesh.planner.core.groups.candidates import Evaluated
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.core.simulation.correction import corrected
from kvmesh.planner.core.simulation.simulated_fleets import FRESH_S, linear_times
from kvmesh.step_times.registry import load_step_profile

PROMISE = Promise("ttft", 0.9, 5.0)
NAME = str(PROMISE)


def planned(rate: float = 2.0, budget_s: float = 10.0, pools: str = "w:max=16") -> PlannedModel:
    model = PlannedModel(pools, promises=[PROMISE], interval_s=10.0, oracle_budget_s=budget_s)
    for pool in model.pools:
        model.start(pool.name, 3)
    model.run(400, rate)
    return model


def asked(model: PlannedModel) -> FleetQuestion:
    """The question of this evaluation or of a later one."""
    for _ in range(10):
        question = model.core.question
        if question is not None:
            return question
        model.run(10, 2.0)
    raise AssertionError("the planner asks nothing")


def simulated(
    question: FleetQuestion, share: Callable[[int], float], names: tuple[str, ...] = (NAME,)
) -> FleetAnswer:
    """An answer in which a fleet of n workers keeps `share(n)`."""
    pool = question.pools[0].name
    return FleetAnswer(
        candidates=[
            FleetCandidate(
                workers={pool: fleet[0]}, cost=fleet[0],
                shares=dict.fromkeys(names, share(fleet[0])),
                quantiles=dict.fromkeys(names, 1.0), evaluated_by="simulation",
            )
            for fleet in question.fleets
        ],
        requests=500,
    )  # fmt: skip


def evaluated(model: PlannedModel, seconds: float = 10.0) -> dict[int, Evaluated]:
    """The candidates of the latest evaluation within `seconds`, by size."""
    before = len(model.plans)
    model.run(seconds, 2.0)
    plans = [plan for _, plan in model.plans[before:] if plan.candidates]
    return {sum(each.workers.values()): each for each in plans[-1].candidates}


def test_a_question_is_about_the_choice_its_neighbours_and_the_present_fleet() -> None:
    model = planned()
    question = asked(model)
    size = model.wanted["w"]
    assert [size] in question.fleets
    assert len(question.fleets) >= 2
    assert all(abs(fleet[0] - size) <= 2 for fleet in question.fleets)
    assert (question.model, question.budget_s) == ("m", 10.0)
    assert question.level == pytest.approx(2.0, rel=0.2)
    assert (model.now - question.since) * question.level >= 100
    pool = question.pools[0]
    assert (pool.step_tokens, pool.kv_tokens) == (8192, 16_384 * 64)
    assert pool.token_s == pytest.approx(1.15 * 2e-4, rel=0.1)
    assert model.core.question is not None  # until it is answered
    model.core.answered(question, simulated(question, lambda n: 0.99), model.now)
    assert model.core.question is None


def test_none_is_asked_without_a_budget_or_a_steady_load() -> None:
    model = planned(budget_s=0.0)
    assert model.core.question is None
    quiet = PlannedModel("w:max=16", promises=[PROMISE], interval_s=10.0, oracle_budget_s=10.0)
    quiet.start("w", 2)
    quiet.run(40, 1.0)
    assert quiet.core.question is None


def test_an_answer_replaces_the_queue_model_and_corrects_it_elsewhere() -> None:
    model = planned()
    size = model.wanted["w"]
    before = evaluated(model, 40.0)
    assert {each.evaluated_by for each in before.values()} == {"queue"}
    question = asked(model)
    model.core.answered(question, simulated(question, lambda n: 0.6), model.now)
    after = evaluated(model)
    for fleet in question.fleets:
        assert after[fleet[0]].evaluated_by == "simulation"
        assert after[fleet[0]].kept.shares == (0.6,)
    others = [each for each in after.values() if each.evaluated_by != "simulation"]
    assert {each.evaluated_by for each in others} == {"corrected queue"}
    assert model.wanted["w"] > size


def test_an_answer_that_agrees_changes_nothing() -> None:
    with_oracle, without = planned(), planned(budget_s=0.0)
    for _ in range(12):
        with_oracle.run(10, 2.0)
        without.run(10, 2.0)
        question = with_oracle.core.question
        if question is not None:
            share = {1: 0.0, 2: 0.5}
            answer = simulated(question, lambda n, s=share: s.get(n, 0.99))  # type: ignore[misc]
            with_oracle.core.answered(question, answer, with_oracle.now)
    assert with_oracle.wanted == without.wanted


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, a: (replace(q, level=q.level * 1.3), a),
        lambda q, a: (replace(q, promises=[replace(q.promises[0], seconds=4.0)]), a),
        lambda q, a: (replace(q, pools=[replace(q.pools[0], token_s=1e-3)]), a),
        lambda q, a: (replace(q, pools=[replace(q.pools[0], kv_tokens=64)]), a),
        lambda q, a: (replace(q, pools=[replace(q.pools[0], name="other")]), a),
        lambda q, a: (q, replace(a, error="busy")),
        lambda q, a: (q, simulated(q, lambda n: 0.1, ("itl p90=5s",))),
        lambda q, a: (q, simulated(q, lambda n: float("nan"))),
    ],
)
def test_an_answer_that_does_not_fit_is_ignored(
    spoil: Callable[[FleetQuestion, FleetAnswer], tuple[FleetQuestion, FleetAnswer]],
) -> None:
    model = planned()
    size = model.wanted["w"]
    question = asked(model)
    question, answer = spoil(question, simulated(question, lambda n: 0.1))
    model.core.answered(question, answer, model.now)
    assert {each.evaluated_by for each in evaluated(model, 40.0).values()} == {"queue"}
    assert model.wanted["w"] == size


def test_an_old_answer_is_not_used() -> None:
    model = planned()
    question = asked(model)
    answer = simulated(question, lambda n: 0.95)
    model.core.answered(question, answer, model.now - FRESH_S - 30.0)
    assert {each.evaluated_by for each in evaluated(model).values()} == {"queue"}


def test_a_fresh_answer_is_not_asked_for_again() -> None:
    model = planned()
    question = asked(model)
    model.core.answered(question, simulated(question, lambda n: min(0.3 * n, 0.99)), model.now)
    model.run(10, 2.0)
    questions = []
    for _ in range(3):
        question = model.core.question or question
        model.core.answered(question, simulated(question, lambda n: min(0.3 * n, 0.99)), model.now)
        model.run(10, 2.0)
        questions.append(model.core.question)
    assert questions[-1] is None


def test_prefill_workers_are_not_simulated() -> None:
    model = planned(pools="dec:serves=decode,max=16,pre:serves=prefill,max=16")
    model.run(60, 2.0)
    assert model.core.question is None


def test_a_correction_moves_shares_by_their_odds() -> None:
    own, nearest, result = (Kept((share,), (1.0,), 0.5) for share in (0.9, 0.8, 0.5))
    moved = corrected(own, nearest, Kept(result.shares, (3.0,), 0.9))
    assert moved.shares[0] == pytest.approx(9 / 4 / (1 + 9 / 4))  # odds 9 · (1/4)
    assert moved.quantiles == (3.0,)
    assert moved.busy == 0.5
    assert corrected(own, nearest, nearest).shares == own.shares
    lost = corrected(Kept((1.0,), (0.0,), 0.0), Kept((1.0,), (0.0,), 0.0), result)
    assert 0.0 < lost.shares[0] < 1.0


def test_the_step_times_of_a_profile_are_asked_about_as_lines() -> None:
    profile = ScaledProfile(load_step_profile("h100-llama-3.1-8b"), prefill=1.5)
    times = linear_times(ModelledEngine(profile, 8192, 256, 400_000))
    assert times.prefill(5000) == pytest.approx(profile.prefill(5000), rel=0.1)
    assert times.decode(128, 200_000) == pytest.approx(profile.decode(128, 200_000), rel=0.1)
