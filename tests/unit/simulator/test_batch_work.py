"""Batch requests beside others in the simulator: they take what is left, and nobody notices."""

from random import Random
from typing import NamedTuple

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
SEED = 3
Times = np.ndarray[tuple[int], np.dtype[np.float64]]


def workload(batch: int, seed: int, per_s: float = 1.2, batch_class: str = "batch") -> Workload:
    """Interactive requests at a Poisson rate until END_S, and `batch` batch requests at once."""
    rng, tree, at = Random(seed), Tree(), 0.0
    rounds: list[Round] = []
    arrivals: list[tuple[float, str]] = []
    while per_s and (at := at + rng.expovariate(per_s)) < END_S:
        arrivals.append((at, ""))
    for at, fair_class in arrivals + [(0.0, batch_class)] * batch:
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


class Found(NamedTuple):
    """Times of the interactive requests, and the numbers of batch requests and errors by END_S."""

    first: Times
    whole: Times
    done: int
    errors: int


def simulated(load: Workload, **router: object) -> Found:
    settings = RouterSettings(policy="kv", **router)  # type: ignore[arg-type]
    options = SimulationOptions(router=settings, workers=(WorkerOptions(4, CORE),))
    records = Simulation(load, options).run()
    interactive = np.array([not each.fair_class for each in load.rounds])
    arrived, ended = np.array(records.arrived), np.array(records.ended)
    return Found(
        (np.array(records.first_token) - arrived)[interactive],
        (ended - arrived)[interactive],
        int((ended[~interactive] < END_S).sum()),
        sum(error is not None for error in records.error),
    )


def test_batch_work_fills_what_is_left_and_others_hardly_notice() -> None:
    alone = simulated(workload(0, SEED))
    beside = simulated(workload(200, SEED), batch_classes=["batch"])
    assert beside.errors == 0
    assert beside.done > 60
    for name in ("first", "whole"):
        times, without = getattr(beside, name), getattr(alone, name)
        assert np.quantile(times, 0.99) < 1.05 * np.quantile(without, 0.99), name
        assert times.mean() < 1.12 * without.mean(), name
    larger = simulated(workload(200, SEED), batch_classes=["batch"], batch_blocks_share=0.1)
    assert larger.done == 200
    as_others = simulated(workload(200, SEED))
    assert as_others.first.mean() > 1.5 * larger.first.mean()


def test_batch_work_has_all_of_an_idle_fleet() -> None:
    ends = []
    for batch_class in ("", "batch"):
        load = workload(300, SEED, 0.0, batch_class)
        settings = RouterSettings(policy="kv", batch_classes=["batch"])
        options = SimulationOptions(router=settings, workers=(WorkerOptions(4, CORE),))
        records = Simulation(load, options).run()
        assert records.error == [None] * 300
        ends.append(max(records.ended))
    assert ends[1] < ends[0] / 0.9
