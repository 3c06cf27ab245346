"""Decisions in hindsight: the arrivals when workers were due, the promises kept since."""

from kvmesh.bus.messages import FleetCandidate, PoolPlan, ScalingDecision
from kvmesh.observer.hindsight import Hindsight, hindsight

TTFT = "ttft p95=2s"


def decision(
    time: float, wanted: int, arrivals: float, kept: float, changed: bool = False
) -> ScalingDecision:
    """A decision about a pool whose workers start within a minute."""
    candidates = [
        FleetCandidate(
            workers={"gpu": count}, cost=count, shares={TTFT: count / 10}, quantiles={TTFT: 1.0}
        )
        for count in (wanted - 1, wanted)
    ]
    return ScalingDecision(
        model="m",
        time=time,
        planner="planner-0",
        reason="",
        changed=changed,
        pools={"gpu": PoolPlan(ready=1, starting=0, before=1, wanted=wanted, startup_s=60.0)},
        signals={"arrivals_per_s": arrivals},
        kept={TTFT: kept},
        candidates=candidates,
    )


def test_a_forecast_is_compared_with_the_load_when_its_workers_are_due() -> None:
    history = [
        decision(0, 4, 1.0, 0.9, changed=True),
        decision(50, 4, 2.0, 0.5),
        decision(65, 4, 3.0, 0.6),
        decision(300, 4, 4.0, 0.97),
    ]
    came = next(hindsight(history))
    assert came == Hindsight(3.0, {TTFT: 0.4}, {TTFT: 0.97})
    assert came.text(2.5) == (
        "arrivals 3.00/s (forecast 2.50/s), kept 97% (modelled 40%) ttft p95=2s"
    )


def test_what_is_kept_counts_until_the_next_change() -> None:
    history = [
        decision(0, 4, 1.0, 0.9, changed=True),
        decision(100, 6, 2.0, 0.8, changed=True),
        decision(120, 5, 3.0, 0.7, changed=True),
    ]
    first, second, last = hindsight(history)
    assert first == Hindsight(2.0, {TTFT: 0.4}, {TTFT: 0.8})
    # The fleet changed again before the workers of the second one were due.
    assert second == Hindsight(None, {TTFT: 0.6}, {})
    assert last == Hindsight(None, {TTFT: 0.5}, {})
    assert last.text(1.0) == "not known yet"
