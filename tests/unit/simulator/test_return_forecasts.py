"""Simulated routers forecast returns, and the engines evict by them."""

from dataclasses import replace
from random import Random

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

BLOCK = 256
AGENT_TURNS = 12
CONVERSATIONS = 240


def mixture() -> Workload:
    """Agents whose tools take twenty seconds, between questions that nobody follows up."""
    rng, tree, rounds, sessions = Random(1), Tree(), list[Round](), list[Session]()
    for number in range(CONVERSATIONS):
        agent, before, tokens = number % 6 == 0, -1, 6000
        branch = tree.fork()
        for _ in range(AGENT_TURNS if agent else 1):
            rounds.append(
                Round(
                    session=number,
                    branch=branch,
                    output_branch=branch,
                    input_tokens=tokens,
                    output_tokens=40,
                    at_s=number * 2.0 if before < 0 else 15 + 10 * rng.random(),
                    after=() if before < 0 else (before,),
                    wait="Bash" if before >= 0 else "",
                )
            )
            before = len(rounds) - 1
            tokens += 300
        sessions.append(Session(name=f"session-{number}"))
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def simulate(forecast: bool, workload: Workload) -> Simulation:
    core = CoreOptions(100_000 // BLOCK, SchedulerLimits(block_size=BLOCK))
    options = SimulationOptions(
        router=RouterSettings(forecast_returns=forecast),
        workers=(WorkerOptions(1, replace(core, speedup=4.0)),),
        replicas=2,
        seed=1,
        deadline_s=36000.0,
    )
    simulation = Simulation(workload, options)
    simulation.run()
    return simulation


def cached(simulation: Simulation) -> int:
    """Prompt tokens that the engines found cached."""
    return sum(worker.core.counters.cached_tokens for worker in simulation.workers.values())


def test_forecasts_keep_the_contexts_of_agents() -> None:
    workload = mixture()
    by_recency, by_forecast = simulate(False, workload), simulate(True, workload)
    assert cached(by_forecast) > 1.1 * cached(by_recency)
    returns = by_forecast.routers.replicas[0].core.learning.returns
    assert returns is not None
    assert returns.shadow.forecasts_win
    waits = {each.waits for each in returns.curves.summaries()}
    assert ("tool", "Bash") in waits
