"""Decisions of planners as rows and points."""

import random

from kvmesh.bus.messages import FleetCandidate, PoolPlan, ScalingDecision
from kvmesh.dashboard.state.plan import (
    MOST_POINTS,
    DemandPoint,
    ModelPlan,
    candidate_rows,
    demand,
    thinned,
)
from kvmesh.observer.plans import by_model

TTFT = "ttft p95=2s"


def decision(
    time: float,
    planner: str = "p-0",
    startup: float = 60.0,
    rate: float = 1.0,
    changed: bool = False,
) -> ScalingDecision:
    return ScalingDecision(
        model="m",
        time=time,
        planner=planner,
        reason="workers 1 → 2: late",
        changed=changed,
        pools={"gpu": PoolPlan(ready=1, starting=1, before=1, wanted=2, startup_s=startup)},
        signals={"arrivals_per_s": rate, "forecast_per_s": rate + 1},
        kept={TTFT: 0.9},
        candidates=[
            FleetCandidate(
                workers={"gpu": count},
                cost=count,
                shares={TTFT: count / 2},
                quantiles={TTFT: 1.5},
                busy=0.5,
            )
            for count in (1, 2)
        ],
    )


def test_a_forecast_is_drawn_at_the_time_for_which_it_was_made() -> None:
    points = demand([decision(0, rate=1), decision(100, rate=2)])
    assert points == [
        DemandPoint(0, 1, None),
        DemandPoint(60, None, 2),
        DemandPoint(100, 2, None),
        DemandPoint(160, None, 3),
    ]


def test_a_shorter_start_up_time_replaces_later_forecasts() -> None:
    points = demand([decision(0, startup=100), decision(50, startup=100), decision(70, startup=10)])
    assert [p.time for p in points if p.forecast is not None] == [80]


def test_late_decisions_of_two_planners_draw_one_line() -> None:
    own = [decision(60.0 * n, rate=1) for n in range(10)]
    others = [decision(60.0 * n + 1, "p-1", rate=9) for n in range(4, 6)]
    mixed = [*own, *others, *own[:3]]
    random.Random(3).shuffle(mixed)
    plan = ModelPlan(by_model(mixed)["m"], since=0.0)
    assert plan.leading == own
    assert [row.time for row in plan.rows(changed_only=False)] == sorted(
        d.time for d in own + others
    )
    came = {row.planner: row.came for row in plan.rows(changed_only=False)}
    assert came["p-1"] == "another planner led"


def test_the_table_holds_the_changes_since_a_time() -> None:
    plan = ModelPlan([decision(0, changed=True), decision(60), decision(120, changed=True)], 60.0)
    [row] = plan.rows(changed_only=True)
    assert (row.time, row.pools, row.kept) == (120, "gpu 1 → 2", f"90.0% {TTFT}")
    assert len(plan.rows(changed_only=False)) == 2
    assert (plan.changes, plan.pools, plan.promises) == (1, ["gpu"], [TTFT])


def test_many_decisions_are_thinned_evenly() -> None:
    many = [decision(float(n)) for n in range(3 * MOST_POINTS + 1)]
    few = thinned(many)
    assert len(few) <= MOST_POINTS
    assert few[-1] is many[-1]
    assert thinned([]) == []


def test_candidates_are_listed_with_their_shares() -> None:
    head, first, chosen = candidate_rows(decision(0))
    assert head == ["workers", "cost per hour", "busy", TTFT, ""]
    assert first == ["gpu 1", "1", "50%", "50.0% (1.5 s)", ""]
    assert chosen[-2:] == ["100.0% (1.5 s)", "chosen"]
