"""The method of testing a claim about policies: scenes, runs over seeds, rows and verdicts."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from common import Report
from numpy.typing import NDArray
from rich.progress import Progress

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.records import Records
from kvmesh.simulator.report.figures import Figures, figures
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Workload

DEADLINE_S = 7200.0
SATURATED = 0.05  # of all requests wait at once
MOST_TIMED = 1500
SETTINGS = {"kv, all active": RouterSettings(admit_agents=False)}


class Run(NamedTuple):
    """One run: its figures, the arrival of each round, and the most requests waiting at once.

    `waiting` is the share of all requests; they waited for their first tokens.
    """

    figures: Figures
    arrived: NDArray[np.float64]
    waiting: float


Pick = Callable[[Run], float]


@dataclass(frozen=True)
class Scene:
    """A fleet under a load. `memory` is in tokens per worker; `speed` divides the waits.

    `engine` is how many times as fast as the default each engine is; `deadline_s` bounds the wait
    for a placement.
    """

    workers: int
    memory: int
    block: int
    speed: float
    engine: float = 1.0
    deadline_s: float = DEADLINE_S

    def options(self, policy: str, seed: int) -> SimulationOptions:
        limits = SchedulerLimits(block_size=self.block)
        core = CoreOptions(self.memory // self.block, limits, speedup=self.engine)
        return SimulationOptions(
            router=SETTINGS.get(policy) or RouterSettings(policy=policy),
            workers=(WorkerOptions(self.workers, core),),
            speed=self.speed,
            seed=seed,
            deadline_s=self.deadline_s,
        )

    @property
    def united(self) -> "Scene":
        """One engine with the memory and speed of all: every placement is right."""
        return Scene(1, self.workers * self.memory, self.block, self.speed, float(self.workers))


@dataclass(frozen=True)
class Case:
    """A workload in a scene, with the seed of both."""

    workload: Workload
    scene: Scene
    seed: int


@dataclass
class Study:
    """Collects rows and verdicts. It stores runs, since several claims use the same ones.

    After each row the report so far is in `json_file`, so that a run that is ended keeps its part.
    `full` asks for more scenes than fit into a few minutes.
    """

    report: Report
    seeds: tuple[int, ...]
    full: bool
    bar: Progress
    json_file: Path | None = None
    verdicts: list[tuple[bool, str]] = field(default_factory=list)
    _kept: dict[tuple[int, Scene, str, int], tuple[Case, Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("runs", total=None)

    def cases(self, workloads: list[Workload], scene: Scene) -> list[Case]:
        """One case per seed."""
        pairs = zip(workloads, self.seeds, strict=True)
        return [Case(workload, scene, seed) for workload, seed in pairs]

    def simulate(self, case: Case, policy: str) -> Simulation:
        simulation = Simulation(case.workload, case.scene.options(policy, case.seed))
        simulation.run()
        self.bar.advance(self._task)
        return simulation

    def run(self, cases: list[Case], policy: str) -> list[Run]:
        return [self.one(case, policy) for case in cases]

    def one(self, case: Case, policy: str) -> Run:
        key = id(case.workload), case.scene, policy, case.seed
        if key not in self._kept:
            simulation = self.simulate(case, policy)
            records = simulation.records
            run = Run(figures(simulation), records.column("arrived"), _most_waiting(records))
            self._kept[key] = case, run  # with its workload, so that its id stays unique
        return self._kept[key][1]

    def at_load_of(self, cases: list[Case], policy: str) -> list[Case]:
        """The first MOST_TIMED rounds at their times under `policy`, replayed on any policy."""
        return [replace(c, workload=_timed(c, self.one(c, policy).arrived)) for c in cases]

    def add(
        self, name: str, runs: list[float], unit: str, claim: str = "", goal: str = ""
    ) -> float:
        """Add a row with the median over the seeds and print it; returns it."""
        self.report.add_runs(name, runs, unit, claim, goal)
        print(f"{name}: {median(runs):.4g} {unit}", file=sys.stderr, flush=True)
        if self.json_file is not None:
            self.report.save("not complete", self.json_file)
        return median(runs)

    def add_cached(self, label: str, cases: list[Case], policy: str, goal: str = "") -> float:
        """Add a row with the share of the ideal hits under a policy."""
        runs = [of_ideal(run) for run in self.run(cases, policy)]
        return self.add(f"{label}: cached, {policy}", runs, "% of ideal", "", goal)

    def conclude(self, claim: str, reached: bool, why: str) -> None:
        """Record the verdict on a claim of the field: if and where it holds, or the difference."""
        self.verdicts.append((reached, f"{claim}: {why}"))

    def generated(
        self, profile: str, sessions: int, per_minute: float | None = None, ends: float = 0.0
    ) -> list[Workload]:
        """A workload of a shipped profile for each seed; a share of `ends` announce their ends."""
        drawn = load_profile(profile)
        agents = [msgspec.structs.replace(agent, ends=ends) for agent in drawn.agents]
        rate = per_minute or drawn.per_minute
        drawn = msgspec.structs.replace(drawn, per_minute=rate, agents=agents)
        return [AgentGenerator(drawn, seed).workload(sessions) for seed in self.seeds]


def _timed(case: Case, arrived: NDArray[np.float64]) -> Workload:
    times = (arrived * case.scene.speed).tolist()
    rounds = [
        msgspec.structs.replace(round_, at_s=at, after=())
        for round_, at in zip(case.workload.rounds, times, strict=True)
    ]
    rounds = sorted(rounds, key=lambda round_: round_.at_s)[:MOST_TIMED]
    return msgspec.structs.replace(case.workload, rounds=rounds)


def unnamed(workload: Workload) -> Workload:
    """The same for engines without hints: their caches are plain LRU."""
    sessions = [msgspec.structs.replace(s, name="", ends=False) for s in workload.sessions]
    return msgspec.structs.replace(workload, sessions=sessions)


def windows(trace: Workload, count: int, length: int) -> Iterator[Workload]:
    """`count` parts of `length` rounds of an open-loop trace, evenly spaced, each from time 0."""
    step = max(len(trace) - length, 0) // max(count - 1, 1)
    for number in range(count):
        part = trace.rounds[number * step : number * step + length]
        rounds = [msgspec.structs.replace(r, at_s=r.at_s - part[0].at_s) for r in part]
        yield msgspec.structs.replace(trace, rounds=rounds)


def _most_waiting(records: Records) -> float:
    arrived, first = (np.sort(records.column(name)) for name in ("arrived", "first_token"))
    begun = first.searchsorted(arrived, "right")
    return float((np.arange(1, len(arrived) + 1) - begun).max()) / len(arrived)


def saturated(runs: list[Run]) -> bool:
    return median(run.waiting for run in runs) > SATURATED


def before_first(run: Run) -> float:
    """Mean seconds to the first token."""
    spread = run.figures.latency.ttft_s
    return spread.mean if spread else float("nan")


def ttft(run: Run) -> float:
    spread = run.figures.latency.ttft_s
    return spread.p50 if spread else float("nan")


def total(run: Run) -> float:
    spread = run.figures.latency.total_s
    return spread.mean if spread else float("nan")


def of_ideal(run: Run) -> float:
    return run.figures.cache.share_of_ideal * 100


def throughput(run: Run) -> float:
    return run.figures.steady_tokens_per_s


def made(run: Run) -> float:
    """Output tokens per second of the whole run."""
    return run.figures.output_tokens_per_s


def lost(run: Run, reason: str) -> float:
    """Percent of the ideal hits that were lost for one reason."""
    cache = run.figures.cache
    ideal = cache.cached_tokens + cache.recomputed_tokens
    return float(100 * getattr(cache.lost, reason) / ideal)


def ratios(over: list[Run], under: list[Run], pick: Pick) -> list[float]:
    return [pick(a) / pick(b) for a, b in zip(over, under, strict=True)]


class Gain(NamedTuple):
    """Ratio of round-robin to kv, in one scene."""

    ttft: float
    latency: float
    where: str

    @property
    def reached(self) -> bool:
        return self.ttft >= 3 and self.latency >= 2

    @property
    def claimed(self) -> float:
        """The satisfied part of the claim, the lesser of both halves."""
        return min(self.ttft / 3, self.latency / 2)

    def __str__(self) -> str:
        return f"TTFT ÷{self.ttft:.1f}, latency ÷{self.latency:.1f} in {self.where}"


def compare(study: Study, label: str, cases: list[Case]) -> Gain:
    """kv against the cache-blind policies."""
    kv = study.run(cases, "kv")
    medians: list[float] = []
    for other in ("round-robin", "random"):
        blind = study.run(cases, other)
        name = f"{label}: {other}{' (saturated)' if saturated(blind) else ''} / kv"
        medians += [
            study.add(f"{name}, TTFT p50", ratios(blind, kv, ttft), "×", "3", "≥ 3"),
            study.add(f"{name}, mean latency", ratios(blind, kv, total), "×", "2", "≥ 2"),
        ]
    return Gain(medians[0], medians[1], label)
