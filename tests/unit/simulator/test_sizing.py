"""Sizing finds the cheapest fleet that keeps the promises, and says if none does."""

from support.sizing import kind, workload

from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.sizing.fleets import SizedFleet
from kvmesh.simulator.sizing.search import size_fleet


def test_the_smallest_fleet_that_keeps_the_promise_is_found() -> None:
    tried: list[SizedFleet] = []
    promise = Promise("ttft", 0.9, 3.0)
    found = size_fleet(workload(2.0), [kind()], [promise], SimulationOptions(), tried.append)
    assert found is not None
    assert found.keeps
    smaller = [each for each in tried if each.counts < found.counts]
    assert smaller
    assert not any(each.keeps for each in smaller)
    assert max(each.counts for each in smaller)[0] == found.counts[0] - 1


def test_a_looser_promise_needs_fewer_workers() -> None:
    found = [
        size_fleet(workload(2.0), [kind()], [Promise("ttft", 0.9, s)], SimulationOptions())
        for s in (1.5, 15.0)
    ]
    strict, loose = found
    assert strict is not None
    assert loose is not None
    assert loose.counts < strict.counts


def test_a_promise_that_no_worker_can_keep_ends_the_search_early() -> None:
    tried: list[SizedFleet] = []
    promise = Promise("ttft", 0.9, 0.01)
    sized = size_fleet(
        workload(0.5, 40), [kind(most=64)], [promise], SimulationOptions(), tried.append
    )
    assert sized is None
    assert len(tried) <= 3


def test_the_cheaper_of_two_kinds_is_chosen() -> None:
    kinds = [kind("dear", 0.1, 5.0), kind("cheap", 0.1, 1.0)]
    found = size_fleet(workload(1.0), kinds, [Promise("ttft", 0.9, 3.0)], SimulationOptions())
    assert found is not None
    assert found.counts[0] == 0
