"""The queue model has the latencies of the simulator, whose engines have blocks and schedulers."""

from dataclasses import dataclass, replace
from math import inf
from random import Random

import numpy as np
import pytest

from kvmesh.planner.capacity.queueing import Latencies, ModelledEngine, RequestShape, latencies
from kvmesh.planner.capacity.step_times import FittedStepTimes
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import Network, SimulationOptions, WorkerOptions
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

TIMES = FittedStepTimes(step=0.02, prefill_step=0.02, token=2e-4, kv_token=1e-7)
KIND = ModelledEngine(TIMES, step_tokens=8192, max_sequences=64, kv_tokens=1_000_000)


@dataclass(frozen=True)
class LinearModel:
    """TIMES as the step model of a mock engine."""

    def prefill(self, tokens: int) -> float:
        return TIMES.prefill(tokens)

    def decode(self, load: DecodeLoad) -> float:
        return TIMES.decode(load.sequences, load.active_tokens)


def poisson(rate: float, count: int, seed: int = 3) -> list[RequestShape]:
    rng, at = Random(seed), 0.0
    shapes = []
    for _ in range(count):
        at += rng.expovariate(rate)
        tokens = int(min(rng.lognormvariate(7.6, 0.7), 30_000))
        shapes.append(RequestShape(at, tokens, tokens, rng.randrange(1, 300)))
    return shapes


def simulated(shapes: list[RequestShape], workers: int) -> tuple[list[float], list[float]]:
    """TTFT and ITL of the same requests in the simulator, each with a prompt of its own."""
    tree = Tree()
    rounds, sessions = [], []
    for number, shape in enumerate(shapes):
        branch = tree.fork()
        sessions.append(Session(name=f"s-{number}"))
        rounds.append(
            Round(
                session=number,
                branch=branch,
                output_branch=branch,
                input_tokens=shape.prompt,
                output_tokens=shape.output,
                at_s=shape.at,
            )
        )
    limits = SchedulerLimits(block_size=64, max_sequences=64, max_batched_tokens=8192)
    core = CoreOptions(15_625, limits, model=LinearModel())
    options = SimulationOptions(
        router=RouterSettings(policy="kv"),
        workers=(WorkerOptions(workers, core),),
        network=Network(overhead=0.0),
    )
    records = Simulation(Workload(tree=tree, sessions=sessions, rounds=rounds), options).run()
    ttft = [first - at for first, at in zip(records.first_token, records.arrived, strict=True)]
    itl = [
        (ended - first) / (shape.output - 1)
        for ended, first, shape in zip(records.ended, records.first_token, shapes, strict=True)
        if shape.output > 1
    ]
    return ttft, itl


def quantiles(values: list[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, [0.5, 0.9, 0.95])]


@pytest.mark.parametrize(("workers", "rate"), [(1, 0.5), (1, 0.9), (4, 3.0)])
def test_latencies_are_those_of_the_simulator(workers: int, rate: float) -> None:
    """Within 5 % with one worker; with several, the router's choices differ: within 25 %."""
    shapes = poisson(rate, 500)
    ttft, itl = simulated(shapes, workers)
    found = latencies(shapes, [KIND] * workers)
    tolerance = 0.05 if workers == 1 else 0.25
    assert quantiles(found.ttft) == pytest.approx(quantiles(ttft), rel=tolerance)
    modelled = [value for value in found.itl if value >= 0]
    assert quantiles(modelled) == pytest.approx(quantiles(itl), rel=tolerance)


def test_a_request_alone_takes_its_steps() -> None:
    found = latencies([RequestShape(5.0, 10_000, 12_000, 11)], [KIND])
    assert found.ttft[0] == pytest.approx(TIMES.prefill(8192) + TIMES.prefill(1808))
    assert found.itl[0] == pytest.approx(TIMES.decode(1, 12_005), rel=0.01)
    assert found.queue == [0.0]


def test_the_wait_ends_with_the_first_step_that_computes_the_prompt() -> None:
    shapes = [RequestShape(1.0, 8192, 8192, 1), RequestShape(1.1, 8192, 8192, 1)]
    found = latencies(shapes, [KIND])
    assert found.queue == pytest.approx([0.0, TIMES.prefill(8192) - 0.1])
    assert found.ttft[1] == pytest.approx(found.queue[1] + TIMES.prefill(8192))


def test_more_workers_never_make_the_median_worse() -> None:
    shapes = poisson(2.0, 400)
    medians = [quantiles(latencies(shapes, [KIND] * n).ttft)[0] for n in (1, 2, 3, 5, 8)]
    assert medians == sorted(medians, reverse=True)


def test_without_workers_all_latencies_are_infinite() -> None:
    assert latencies(poisson(1.0, 2), []) == Latencies([inf] * 2, [-1.0] * 2, [inf] * 2, 1.0)


def test_without_requests_there_is_no_latency() -> None:
    assert latencies([], [KIND]) == Latencies([], [], [], 0.0)


def test_a_prompt_beyond_the_memory_is_refused_and_blocks_no_other() -> None:
    shapes = [RequestShape(0.0, 50, 2_000_000, 5), RequestShape(0.1, 100, 100, 2)]
    found = latencies(shapes, [KIND])
    assert found.ttft[0] == found.queue[0] == inf
    assert found.ttft[1] < 1


def test_requests_beyond_the_memory_wait_for_it() -> None:
    small = replace(KIND, kv_tokens=10_000)
    shapes = [RequestShape(0.0, 9000, 9000, 50), RequestShape(0.1, 9000, 9000, 2)]
    found = latencies(shapes, [small])
    assert found.queue[1] >= found.ttft[0] + 48 * TIMES.decode(1, 9000) - 0.1


@pytest.mark.parametrize("shape", [(0, 0, 1), (1, 1, 10_000_000), (100_000, 100_000, 1)])
def test_extreme_requests_end(shape: tuple[int, int, int]) -> None:
    uncached, prompt, output = shape
    found = latencies([RequestShape(1e9, uncached, prompt, output)] * 3, [KIND])
    assert all(0 <= value < inf for value in found.ttft)


def test_workers_of_several_kinds_share_the_requests() -> None:
    fast = replace(KIND, times=FittedStepTimes(0.01, 0.01, 5e-5, 1e-8))
    shapes = poisson(2.0, 300)
    slow, mixed, both_fast = (
        quantiles(latencies(shapes, kinds).ttft)[1]
        for kinds in ([KIND, KIND], [KIND, fast], [fast, fast])
    )
    assert both_fast < mixed < slow
