"""Batch requests beside others in the simulator: they take what is left, and nobody notices."""

from random import Random

import numpy as np

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

CORE = CoreOptions(4096, SchedulerLimits(block_size=64), speedup=0.1)
END_S = 240.0
SEEDS = (3, 4, 5)
Times = np.ndarray[tuple[int], np.dtype[np.float64]]


def workload(batch: int, seed: int) -> Workload:
    """Interactive requests at a Poisson rate until END_S, and `batch` batch requests at once."""
    rng, tree, at = Random(seed), Tree(), 0.0
    rounds: list[Round] = []
    arrivals: list[tuple[float, str]] = []
    while (at := at + rng.expovariate(1.2)) < END_S:
        arrivals.append((at, ""))
    for at, fair_class in arrivals + [(0.0, "batch")] * batch:
        branch = tree.fork()
        rounds.append(
            Round(
                session=len(rounds), branch=branch, output_branch=branch, at_s=at,
                input_tokens=rng.randrange(500, 4000), output_tokens=rng.randrange(20, 100),
                fair_class=fair_class,
            )
        )  # fmt: skip
    sessions = [Session(name=str(number)) for number in range(len(rounds))]
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def ttft(batch: int, seed: int = 3, **router: object) -> tuple[Times, int, int]:
    """TTFT of the interactive requests, batch requests that ended within END_S, and errors."""
    settings = RouterSettings(policy="kv", **router)  # type: ignore[arg-type]
    load = workload(batch, seed)
    simulation = Simulation(
        load, SimulationOptions(router=settings, workers=(WorkerOptions(4, CORE),))
    )
    records = simulation.run()
    interactive = [not each.fair_class for each in load.rounds]
    times = np.array(records.first_token) - np.array(records.arrived)
    ended = sum(e < END_S for e, i in zip(records.ended, interactive, strict=True) if not i)
    return times[interactive], ended, sum(e is not None for e in records.error)


def test_batch_work_fills_what_is_left_and_others_hardly_notice() -> None:
    alone = np.concatenate([ttft(0, seed)[0] for seed in SEEDS])
    runs = [ttft(200, seed, batch_classes=["batch"]) for seed in SEEDS]
    beside = np.concatenate([times for times, _, _ in runs])
    as_others, _, _ = ttft(200, SEEDS[0])
    assert [(ended, errors) for _, ended, errors in runs] == [(200, 0)] * len(SEEDS)
    assert beside.mean() < 1.25 * alone.mean()
    assert np.quantile(beside, 0.95) < 1.4 * np.quantile(alone, 0.95)
    assert as_others.mean() > 1.5 * beside.mean()


def test_a_smaller_share_is_noticed_less() -> None:
    alone, _, _ = ttft(0)
    beside, ended, _ = ttft(200, batch_classes=["batch"], batch_blocks_share=0.02)
    assert ended > 100
    assert beside.mean() < 1.12 * alone.mean()
