"""Placement on engines of unlike and changing speed, beside equal ones.

Requests have fixed times of arrival, whatever the policy. Loads are shares of the capacity of the
fleet, its slow engines counted as they are: the most requests per second of the first seed that
`kv`, told the true speeds, ends under ever more load. Times are those of the requests after the
first WARM_UP ones, and tokens/s those of requests that end before the last one arrives. Figures are
medians over the seeds, and in brackets over those of `kv` without learned speeds with the same
seed. The last column is the share of the prompt tokens on the first engine.

The policies: `kv` without learned speeds, `kv`, and two that are told the true speeds at all times:
`kv`, and the least time until the first token. The last row is a bound for all of them: `kv`
without learned speeds on engines of which none is slow, with the same arrivals. With `--silent`,
engines report no step durations, as those behind HTTP.
"""

import sys
from dataclasses import replace
from random import Random
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from common import Report, parser
from rich.console import Console
from rich.table import Table

from kvmesh.bus.messages import Load
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import SHORTAGE_COST, CostModel, pick
from kvmesh.router.state.arrays import Floats
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.records import Records, WorkerRecord
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.worker.engines.mock.pace import PaceOptions
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.distributions import Quantiles
from kvmesh.workload.generate.profile import Agent, AgentProfile, Human, load_profile
from kvmesh.workload.model import Workload

WARM_UP = 200
BLOCK = 64
ENGINES = 4
TRUTH_S = 0.25
STEADY = PaceOptions()


class SoonestToken(Policy):
    """The fewest seconds of prefill before the first token, on a rank with free memory."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.prefill(candidates)
        if candidates.slowness is not None:
            cost = cost * candidates.slowness
        if candidates.shortage is not None:
            cost = cost + SHORTAGE_COST * candidates.shortage
        return PolicyChoice(pick(cost, 0.0, rng), cost)


BLIND, KV = "kv without speeds", "kv"
TOLD, SOONEST = "kv told the speeds", "soonest token told the speeds"
HEALTHY = "kv with no engine slow"
POLICIES = {
    BLIND: RouterSettings(learn_speeds=False),
    KV: RouterSettings(),
    TOLD: RouterSettings(),
    SOONEST: RouterSettings(policy="unlike_engines:SoonestToken"),
    HEALTHY: RouterSettings(learn_speeds=False),
}


class UnlikeSimulation(Simulation):
    """A simulation whose routers are `told` the true speeds, or whose engines are `silent`."""

    def __init__(
        self, workload: Workload, options: SimulationOptions, told: bool, silent: bool
    ) -> None:
        super().__init__(workload, options)
        self._report = self.routers.report
        if silent:
            self.routers.report = self._report_silently  # type: ignore[method-assign]
        if told:
            self.clock.after(0.0, self._tell)

    def _report_silently(self, loads: list[Load]) -> None:
        self._report([msgspec.structs.replace(load, busy_s=0.0) for load in loads])

    def _tell(self) -> None:
        for replica in self.routers.replicas:
            core = replica.core
            slow = np.ones(core.table.size)
            for worker in self.workers.values():
                slot = core.table.find_slot(worker.instance, 0)
                slow[slot] = max(worker.core.slower)
            core.speeds.slowness = slow / np.sort(slow)[(len(slow) - 1) // 2]
        self.clock.after(TRUTH_S, self._tell)


class Fleet(NamedTuple):
    """Engines by their paces."""

    key: str
    title: str
    paces: tuple[PaceOptions, ...]


SLOW = PaceOptions(prefill=3.0, decode=3.0)
NOISY = PaceOptions(noise=4.0, noise_s=30.0, calm_s=60.0)
HOT = PaceOptions(heat=3.0, heat_s=60.0)
FLEETS = (
    Fleet("equal", "four equal engines", (STEADY,) * 4),
    Fleet("slow", "one of four engines three times slower", (SLOW, STEADY, STEADY, STEADY)),
    Fleet(
        "old",
        "two of four engines 1.6 times slower",
        (*(PaceOptions(prefill=1.6, decode=1.6),) * 2, STEADY, STEADY),
    ),
    Fleet(
        "decode",
        "one of four engines three times slower for output only",
        (PaceOptions(decode=3.0), STEADY, STEADY, STEADY),
    ),
    Fleet("noisy", "noisy neighbours: four times slower a third of the time", (NOISY,) * 4),
    Fleet("hot", "heat: up to three times slower for two of four", (HOT, HOT, STEADY, STEADY)),
)


class Clients(NamedTuple):
    """A kind of clients, the memory of an engine in tokens, and a rate below any fleet's capacity.

    Rates are in requests per second.
    """

    key: str
    title: str
    profile: AgentProfile
    sessions: int
    memory: int
    low_rate: float


CHAT = AgentProfile(
    description="people who chat",
    sessions=1,
    per_minute=60.0,
    agents=[
        Agent(
            name="chat",
            share=1.0,
            prompt_tokens=1500,
            prompt_variants=4,
            task=Quantiles(p50=3000, p90=12_000, max=32_000),
            output=Quantiles(p50=350, p90=900, max=2500),
            steps=1,
            human=Human(turns=4, wait_s=Quantiles(p50=20, p90=60, max=120), message=150),
        )
    ],
)
DOCUMENTS = AgentProfile(
    description="questions about documents",
    sessions=1,
    per_minute=60.0,
    agents=[
        Agent(
            name="reader",
            share=1.0,
            prompt_tokens=20_000,
            prompt_variants=60,
            task=Quantiles(p50=300, p90=1500, max=6000),
            output=Quantiles(p50=50, p90=150, max=500),
            steps=1,
        )
    ],
)
SINGLE = AgentProfile(
    description="single prompts that share nothing",
    sessions=1,
    per_minute=60.0,
    agents=[
        Agent(
            name="single",
            share=1.0,
            prompt_tokens=0,
            task=Quantiles(p50=3000, p90=12_000, max=32_000),
            output=Quantiles(p50=100, p90=400, max=1500),
            steps=1,
        )
    ],
)
CLIENTS = (
    Clients("single", "single prompts that share nothing", SINGLE, 2200, 500_000, 8.0),
    Clients("chat", "people who chat", CHAT, 600, 500_000, 6.0),
    Clients("agents", "coding agents", load_profile("coding-agents"), 60, 750_000, 1.5),
    Clients("documents", "questions about 60 documents", DOCUMENTS, 2200, 500_000, 10.0),
)
LOADS = (0.6, 0.8, 0.95, 1.1)
FASTER = 1.3  # each step of the search for the capacity
KEPT_UP = 0.92  # of the offered rate, at least, served below the capacity


class Figures(NamedTuple):
    """Of one run; times in seconds. `first` is the share of prompt tokens on the first engine."""

    ttft_p50: float
    ttft_p95: float
    latency: float
    cached: float
    tokens_per_s: float
    first: float


def open_loop(clients: Clients, seed: int, count: int) -> Workload:
    """`count` requests at the times of an unloaded fleet, which no policy changes."""
    made = AgentGenerator(clients.profile, seed).workload(clients.sessions)
    core = CoreOptions(clients.memory * 4 // BLOCK, SchedulerLimits(block_size=BLOCK), speedup=4.0)
    unloaded = SimulationOptions(workers=(WorkerOptions(ENGINES, core),), seed=seed)
    arrived = Simulation(made, unloaded).run().column("arrived").tolist()
    rounds = [
        msgspec.structs.replace(round_, at_s=at, after=())
        for round_, at in zip(made.rounds, arrived, strict=True)
    ]
    rounds = sorted(rounds, key=lambda round_: round_.at_s)
    skipped = len(rounds) // 5  # until sessions are at all stages
    rounds = rounds[skipped : skipped + count]
    start = rounds[0].at_s
    rounds = [msgspec.structs.replace(each, at_s=each.at_s - start) for each in rounds]
    return msgspec.structs.replace(made, rounds=rounds)


class Scene(NamedTuple):
    """A fleet under the load of clients."""

    fleet: Fleet
    clients: Clients
    silent: bool

    def run(
        self, workload: Workload, policy: str, rate: float, seed: int
    ) -> tuple[Records, list[WorkerRecord]]:
        """The records of requests that arrive at a rate per second, and those of the engines."""
        core = CoreOptions(self.clients.memory // BLOCK, SchedulerLimits(block_size=BLOCK))
        paces = [STEADY] * ENGINES if policy == HEALTHY else self.fleet.paces
        options = SimulationOptions(
            router=POLICIES[policy],
            workers=tuple(WorkerOptions(1, replace(core, pace=pace)) for pace in paces),
            speed=rate * workload.rounds[-1].at_s / len(workload),
            seed=seed,
            deadline_s=7200.0,
        )
        simulation = UnlikeSimulation(workload, options, policy in (TOLD, SOONEST), self.silent)
        records = simulation.run()
        return records, list(simulation.worker_records.values())

    def capacity(self, workload: Workload, seed: int) -> float:
        """The most requests per second that `kv`, told the speeds, ends under rising load."""
        most, rate = 0.0, self.clients.low_rate
        while True:
            records, _ = self.run(workload, TOLD, rate, seed)
            served = _per_second(records)
            most = max(most, served)
            if served < KEPT_UP * rate:
                return most
            rate *= FASTER

    def play(self, workload: Workload, policy: str, rate: float, seed: int) -> Figures:
        """Run the workload at a rate in requests per second."""
        records, engines = self.run(workload, policy, rate, seed)
        arrived, first, ended = (
            records.column(name)[WARM_UP:] for name in ("arrived", "first_token", "ended")
        )
        return Figures(
            ttft_p50=float(np.nanmedian(first - arrived)),
            ttft_p95=float(np.nanquantile(first - arrived, 0.95)),
            latency=float(np.nanmean(ended - arrived)),
            cached=sum(e.cached_tokens for e in engines) / sum(e.prompt_tokens for e in engines),
            tokens_per_s=_per_second(records, records.column("output")),
            first=engines[0].prompt_tokens / sum(e.prompt_tokens for e in engines),
        )


def _per_second(records: Records, weights: Floats | None = None) -> float:
    """Requests, or their `weights`, that end per second between two arrivals.

    From the WARM_UPth to the last one.
    """
    arrived, ended = records.column("arrived"), records.column("ended")
    start, end = float(arrived[WARM_UP]), float(arrived[-1])
    within = (ended > start) & (ended <= end)
    served = within.sum() if weights is None else weights[within].sum()
    return float(served) / (end - start)


def show(scene: Scene, load: float, found: dict[str, list[Figures]], report: Report) -> None:
    """Print the figures of a scene, and add those with a target."""
    silent = ", no step durations" if scene.silent else ""
    title = f"{scene.fleet.title}: {scene.clients.title}, load {load:.0%}{silent}"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for heading in ("TTFT p50, s", "TTFT p95, s", "latency, s", "cached", "tokens/s", "on 1st"):
        table.add_column(heading, justify="right")
    blind = found[BLIND]
    for policy, runs in found.items():
        cells = []
        for at, name in enumerate(Figures._fields):
            cell = f"{median(run[at] for run in runs):,.3g}"
            if name not in ("cached", "first"):
                ratio = median(run[at] / base[at] for run, base in zip(runs, blind, strict=True))
                cell += f" ({ratio:.2f}×)"
            cells.append(cell)
        table.add_row(policy, *cells)
        if policy != BLIND:
            for at, name in enumerate(Figures._fields[:3]):
                ratios = [run[at] / base[at] for run, base in zip(runs, blind, strict=True)]
                targeted = (name, scene.fleet.key, policy) == ("ttft_p50", "slow", KV)
                label = f"{scene.fleet.key}, {scene.clients.key} {load:.0%}{silent}: {policy}"
                goal = "≤ 0.5" if targeted else ""
                report.add_runs(f"{label}: {name}", ratios, "× blind", "", goal)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds")
    arguments.add_argument("--requests", type=int, default=1200, metavar="N", help="of each run")
    arguments.add_argument("--only", default="", metavar="FLEET,…", help="keys of fleets")
    arguments.add_argument("--clients", default="", metavar="KEY,…", help="keys of clients")
    arguments.add_argument("--loads", default="", metavar="SHARE,…", help="of the capacity")
    arguments.add_argument("--policies", default=",".join(POLICIES), metavar="NAME,…")
    arguments.add_argument("--silent", action="store_true", help="engines report no step durations")
    chosen = arguments.parse_args()
    fleets, kinds = tuple(chosen.only.split(",")), tuple(chosen.clients.split(","))
    policies = dict.fromkeys([BLIND, *chosen.policies.split(",")])
    report = Report("Unlike engines (virtual time)")
    loads = tuple(map(float, filter(None, chosen.loads.split(",")))) or LOADS
    for clients in CLIENTS:
        if not clients.key.startswith(kinds):
            continue
        workloads = [open_loop(clients, seed, chosen.requests) for seed in range(chosen.seeds)]
        for fleet in FLEETS:
            if not fleet.key.startswith(fleets):
                continue
            scene = Scene(fleet, clients, chosen.silent)
            capacity = scene.capacity(workloads[0], 0)
            label = f"{fleet.key}, {clients.key}: capacity"
            report.add(label, capacity, "requests/s")
            for load in loads:
                found = {
                    policy: [
                        scene.play(w, policy, load * capacity, seed)
                        for seed, w in enumerate(workloads)
                    ]
                    for policy in policies
                }
                show(scene, load, found, report)
                if chosen.json is not None:
                    report.save("not complete", chosen.json)
    report.finish("unlike engines: learned speeds over kv without speeds", chosen.json)


if __name__ == "__main__":
    main()
