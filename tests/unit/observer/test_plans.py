"""The history of decisions: in order, without repeats, by one planner at a time."""

import random

import pytest

from kvmesh.bus.messages import PoolPlan, ScalingDecision
from kvmesh.observer.plans import by_model, leading, promised_share, sizes, worker_hours


def decision(
    time: float, planner: str = "p-0", model: str = "m", ready: int = 1
) -> ScalingDecision:
    return ScalingDecision(
        model=model,
        time=time,
        planner=planner,
        reason="",
        changed=False,
        pools={"gpu": PoolPlan(ready=ready, starting=0, before=1, wanted=2, startup_s=60.0)},
        signals={},
        kept={},
    )


def test_late_and_repeated_decisions_are_put_in_order() -> None:
    history = [decision(60.0 * n) for n in range(5)]
    mixed = [*history, *history[1:3], decision(30.0, model="other")]
    random.Random(1).shuffle(mixed)
    assert by_model(mixed) == {"m": history, "other": [decision(30.0, model="other")]}


def test_a_second_planner_counts_only_after_the_first_has_ended() -> None:
    first = [decision(60.0 * n) for n in range(6)]
    intruder = decision(90.0, "p-1")
    later = [decision(330.0 + 60.0 * n, "p-1") for n in range(3)]
    both = by_model([*first, intruder, *later])["m"]
    assert leading(both) == [*first, *later]


def test_a_planner_may_lead_again_after_another() -> None:
    history = [decision(0.0), decision(100.0, "p-1"), decision(2000.0)]
    assert leading(history) == history
    assert leading([]) == []


def test_worker_hours_are_those_of_ready_workers() -> None:
    history = [decision(0.0, ready=2), decision(1800.0, ready=4), decision(3600.0, ready=9)]
    assert worker_hours(history) == pytest.approx(3.0)
    assert worker_hours(history[:1]) == 0.0
    assert sizes(history[0]) == "gpu 1 → 2"


@pytest.mark.parametrize(
    ("promise", "share"),
    [("ttft p95=2s", 0.95), ("itl batch:p99.9=0.05s", 0.999), ("ttft", None), ("p-1:x", None)],
)
def test_the_share_that_a_promise_names(promise: str, share: float | None) -> None:
    assert promised_share(promise) == (None if share is None else pytest.approx(share))
