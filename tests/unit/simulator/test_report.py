"""The HTML report states its settings, and breaks lines where there is nothing to draw."""

import re
from dataclasses import replace

import numpy as np

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.report.conditions import conditions
from kvmesh.simulator.report.figures import figures
from kvmesh.simulator.report.page import page
from kvmesh.simulator.report.plots import plot
from kvmesh.step_times.registry import load_step_profile, shipped_profiles
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.simulated_tiers import TierOptions
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

CORE = CoreOptions(
    blocks=1024,
    limits=SchedulerLimits(block_size=32, max_sequences=16),
    tiers=TierOptions(host_blocks=2048),
    speedup=2.0,
)
OPTIONS = SimulationOptions(workers=(WorkerOptions(3, CORE),), seed=7, speed=1.5)


def apart(seconds: float) -> Workload:
    """Two requests each at the beginning and `seconds` later."""
    tree = Tree()
    branch = tree.fork()
    rounds = [
        Round(
            session=0,
            branch=branch,
            output_branch=branch,
            input_tokens=100,
            output_tokens=5,
            at_s=at,
        )
        for at in (0.0, 1.0, seconds, seconds + 1.0)
    ]
    return Workload(tree=tree, sessions=[Session(name="s")], rounds=rounds)


def lines(text: str) -> list[str]:
    """The points of the plotted lines."""
    return re.findall(r'<polyline points="([^"]*)"', text)


def test_a_line_breaks_where_it_has_no_value() -> None:
    x = np.arange(6.0)
    y = np.array([1.0, 2.0, np.nan, np.nan, 3.0, 4.0])
    assert [len(points.split()) for points in lines(plot([("a", x, y)], "s", "share"))] == [2, 2]


def test_a_value_between_breaks_is_a_dot() -> None:
    y = np.array([np.nan, 1.0, np.nan])
    (points,) = lines(plot([("a", np.arange(3.0), y)], "s", "share"))
    first, second = points.split()
    assert first == second


def test_a_line_without_values_is_not_drawn() -> None:
    assert plot([("a", np.arange(2.0), np.full(2, np.nan))], "s", "share") == "<p>no data</p>"


def test_the_cached_share_breaks_where_no_requests_arrive() -> None:
    simulation = Simulation(apart(600.0), OPTIONS)
    simulation.run()
    text = page("a title", [(simulation, figures(simulation))])
    begin = text.index("<h2>Cached share")
    assert len(lines(text[begin : text.index("<h2>Sequences")])) == 2
    assert "3, each with 1,024 blocks, 2,048 in host memory" in text


def test_the_settings_of_a_run_are_listed() -> None:
    router = RouterSettings(policy="session", queue_threshold=9.5)
    found = dict(conditions(replace(OPTIONS, router=router)))
    assert found["policy"] == "session"
    assert found["workers"].endswith("step times of the mock engine, 2 × as fast")
    assert (found["tokens per block"], found["seed"]) == ("32", "7")
    assert found["speed of arrivals"] == "1.5 ×"
    assert found["router.queue_threshold"] == "9.5"
    assert "router.queue_limit" not in found


def test_the_profile_of_step_times_is_named() -> None:
    name = next(iter(shipped_profiles()))
    core = replace(CORE, model=load_step_profile(name))
    found = dict(conditions(replace(OPTIONS, workers=(WorkerOptions(1, core),))))
    assert f"step times of {name}" in found["workers"]
