"""A fleet that has kept its promises at a steady load is large enough for it."""

import pytest
from support.planned_model import BLOCK, PlannedModel, decision, outcome

from kvmesh.planner.core.fleets import Aim
from kvmesh.planner.core.groups.measured_fleet import FEWEST, LATEST_S, PROOF_S, MeasuredFleet
from kvmesh.planner.core.promises import Promise

TTFT = Promise("ttft", 0.95, 2.0)
AIMS = [Aim(TTFT, [], [], True)]


def served(late: int, seconds: float = LATEST_S) -> PlannedModel:
    """One request a second, every `late`-th later than promised."""
    model = PlannedModel(promises=[TTFT])
    start = model.now
    for number in range(int(seconds)):
        at = start + number
        model.core.on_route(decision(f"r{number}", at, tokens=4 * BLOCK), at)
        ttft = 3.0 if number % late == 0 else 0.5
        model.core.on_route(outcome(f"r{number}", at, ttft=ttft), at)
    model.now = start + seconds
    model.core.decide(model.now)
    return model


@pytest.mark.parametrize(("late", "keeps"), [(30, True), (10, False)])
def test_measured_shares_prove_a_fleet(late: int, keeps: bool) -> None:
    model = served(late)
    level = model.core.demand.series.level
    assert MeasuredFleet(model.core).keeps(AIMS, level, 0.0, model.now) is keeps


def test_a_new_fleet_a_higher_load_or_few_requests_prove_nothing() -> None:
    model = served(30)
    level = model.core.demand.series.level
    measured = MeasuredFleet(model.core)
    assert not measured.keeps(AIMS, level, model.now - PROOF_S + 1, model.now)
    assert not measured.keeps(AIMS, level * 1.01, 0.0, model.now)
    few = served(30, FEWEST - 1)
    assert not MeasuredFleet(few.core).keeps(
        AIMS, few.core.demand.series.level, 0.0, few.now + PROOF_S
    )
