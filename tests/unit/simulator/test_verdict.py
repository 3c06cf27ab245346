"""A simulation that stops early reaches the verdict of the whole run."""

from dataclasses import replace
from functools import cache

import pytest
from support.sizing import kind, workload

from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.records import Records
from kvmesh.simulator.sizing.fleets import ENDED, simulate_fleet
from kvmesh.simulator.sizing.verdict import PromiseWatch

LOAD = workload(2.0, 160)
KINDS = [kind()]


@cache
def unwatched(count: int) -> Records:
    """The records of a run that no promise ends."""
    fleet = (replace(KINDS[0].options, count=count),)
    return Simulation(LOAD, SimulationOptions(workers=fleet, ended_share=ENDED)).run()


@pytest.mark.parametrize("seconds", [0.8, 4.0])
@pytest.mark.parametrize("metric", ["ttft", "queue", "itl"])
def test_an_early_stop_decides_as_the_whole_run(metric: str, seconds: float) -> None:
    bound = seconds / 20 if metric == "itl" else seconds
    promises = [Promise(metric, 0.9, bound), Promise("ttft", 0.5, 30.0)]
    for count in (1, 2, 3, 5):
        early = simulate_fleet(LOAD, KINDS, (count,), promises, SimulationOptions(), whole=False)
        watch = PromiseWatch(promises, len(LOAD), whole=True)
        shares, quantiles = watch.outcome(unwatched(count))
        kept = all(s >= p.quantile for s, p in zip(shares, promises, strict=True))
        assert early.keeps is kept
        if not early.stopped:
            assert (early.shares, early.quantiles) == (shares, quantiles)
            continue
        assert not early.keeps
        assert all(a >= b for a, b in zip(early.shares, shares, strict=True))
        assert all(a <= b for a, b in zip(early.quantiles, quantiles, strict=True))


def test_an_overloaded_fleet_is_stopped() -> None:
    promise = Promise("ttft", 0.9, 3.0)
    early = simulate_fleet(LOAD, KINDS, (1,), [promise], SimulationOptions(), whole=False)
    assert early.stopped
    assert early.shares[0] < promise.quantile


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_outcome_is_that_of_a_run_that_nobody_watches(count: int) -> None:
    promises = [Promise("ttft", 0.9, 3.0), Promise("itl", 0.9, 0.1), Promise("queue", 0.9, 1.0)]
    outcome = PromiseWatch(promises, len(LOAD), whole=True).outcome(unwatched(count))
    watched = simulate_fleet(LOAD, KINDS, (count,), promises, SimulationOptions())
    assert (watched.shares, watched.quantiles) == outcome
    assert watched.keeps is all(
        s >= p.quantile for s, p in zip(watched.shares, promises, strict=True)
    )
