"""More agents than memory: pausing some keeps the contexts of others, and all finish sooner."""

from random import Random

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.report.figures import Figures, figures
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

BLOCK = 256
AGENTS = 24
TURNS = 14


def agents() -> Workload:
    """Closed loops: 24K tokens in common, then each turn a tool's result, after a second or two."""
    rng, tree, rounds = Random(1), Tree(), list[Round]()
    system = tree.fork()
    for agent in range(AGENTS):
        branch = tree.fork(system, 24_000)
        tokens, before = 24_000 + rng.randrange(10_000, 40_000), -1
        for _ in range(TURNS):
            rounds.append(
                Round(
                    session=agent,
                    branch=branch,
                    output_branch=branch,
                    input_tokens=tokens,
                    output_tokens=60,
                    at_s=rng.random() * (20 if before < 0 else 3),
                    after=() if before < 0 else (before,),
                )
            )
            before = len(rounds) - 1
            tokens += 60 + rng.randrange(500, 2000)
    sessions = [Session(name=f"agent-{number}") for number in range(AGENTS)]
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def run(admits: bool, tokens: int, deadline_s: float = 36000.0) -> Figures:
    core = CoreOptions(tokens // BLOCK, SchedulerLimits(block_size=BLOCK))
    options = SimulationOptions(
        router=RouterSettings(admit_agents=admits),
        workers=(WorkerOptions(2, core),),
        seed=1,
        deadline_s=deadline_s,
    )
    simulation = Simulation(agents(), options)
    simulation.run()
    return figures(simulation)


def test_under_pressure_resting_agents_raises_the_throughput() -> None:
    everybody, some = run(False, 300_000), run(True, 300_000)
    assert everybody.failed == some.failed == 0
    assert everybody.cache.share_of_ideal < 0.6, "there is pressure"
    assert some.cache.share_of_ideal > everybody.cache.share_of_ideal + 0.1
    assert some.output_tokens_per_s > 1.05 * everybody.output_tokens_per_s


def test_no_request_is_refused_for_a_rest() -> None:
    assert run(True, 300_000, deadline_s=60.0).failed == 0


def test_no_agent_rests_if_all_fit() -> None:
    everybody, some = run(False, 1_000_000), run(True, 1_000_000)
    assert some.latency.ttft_s == everybody.latency.ttft_s
