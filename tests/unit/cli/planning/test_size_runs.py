"""Runs of several seeds: side by side as one after the other, and an error ends them all."""

import dataclasses
from multiprocessing import active_children

import pytest
from msgspec.structs import replace

from kvmesh.cli.planning import size_runs
from kvmesh.cli.planning.kinds import tier_choices
from kvmesh.cli.planning.size_runs import SeedRuns, fleet_text, kept_text
from kvmesh.planner.core.promises import Promise
from kvmesh.settings.schema import MockSettings
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.sizing.fleets import SizedFleet
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.generate.scaling import scale_sessions

WORKLOAD = AgentGenerator(load_profile("coding-agents"), 0).workload(4)
PROMISES = [Promise("ttft", 0.9, 2.0)]


def runs() -> SeedRuns:
    choices = tier_choices(["gpu:speedup=0.2,host_gib=0|8,host_gib_cost=0.1"], "", MockSettings())
    return SeedRuns(choices, PROMISES, SimulationOptions())


def test_processes_side_by_side_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = [scale_sessions(WORKLOAD, 1.0, seed) for seed in range(3)]
    serial = runs().size(workloads)
    monkeypatch.setattr(size_runs, "PARALLEL", 0)
    parallel = runs().size(workloads)
    assert [each.fleet for each in parallel] == [each.fleet for each in serial]
    assert [each.tried for each in parallel] == [each.tried for each in serial]
    assert not active_children()


def test_other_seeds_begin_with_the_first_answer() -> None:
    first, second = runs().size([WORKLOAD, WORKLOAD])
    assert first.fleet is not None
    assert second.fleet == first.fleet
    chosen, fleet = second.tried[0]
    assert fleet_text(fleet, chosen) == fleet_text(first.fleet, first.kinds)


def test_an_error_in_one_process_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_runs, "PARALLEL", 0)
    broken = scale_sessions(WORKLOAD, 1.0, 1)
    broken.rounds[0] = replace(broken.rounds[0], after=(10**6,))
    with pytest.raises(IndexError):
        runs().size([WORKLOAD, broken, broken])
    assert not active_children()


def test_no_other_seed_is_simulated_if_none_keeps_the_promises_in_the_first() -> None:
    impossible = dataclasses.replace(runs(), promises=[Promise("ttft", 0.9, 0.001)])
    (only,) = impossible.size([WORKLOAD, WORKLOAD])
    assert only.fleet is None
    assert only.tried


def test_shares_of_a_stopped_simulation_are_called_bounds() -> None:
    fleet = SizedFleet((3,), 3.0, (0.61,), (9.0,), keeps=False)
    stopped = dataclasses.replace(fleet, stopped=True)
    assert kept_text(PROMISES, [fleet]) == "ttft p90=2s for 61.0%"
    assert kept_text(PROMISES, [stopped]) == "ttft p90=2s for at most 61.0%"
