"""Sizing finds the cheapest fleet that keeps the promises, and says if none does."""

from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.sizing import SizedFleet, WorkerKind, size_fleet
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree


def workload(per_second: float, requests: int = 120, tokens: int = 4000) -> Workload:
    tree = Tree()
    branches = [tree.fork() for _ in range(requests)]
    rounds = [
        Round(
            session=number,
            branch=branch,
            output_branch=branch,
            input_tokens=tokens,
            output_tokens=20,
            at_s=number / per_second,
        )
        for number, branch in enumerate(branches)
    ]
    sessions = [Session(name=str(number)) for number in range(requests)]
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def kind(name: str = "w", speedup: float = 0.1, cost: float = 1.0, most: int = 16) -> WorkerKind:
    core = CoreOptions(4096, SchedulerLimits(block_size=64), speedup=speedup)
    return WorkerKind(name, WorkerOptions(1, core, cost=cost), most)


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
