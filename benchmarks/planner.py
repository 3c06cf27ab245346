"""The planner beside static fleets, Dynamo's planner, llm-d, KEDA and a clairvoyant."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from common import parser
from planner_baselines import Baseline, DynamoSla, DynamoThresholds, KvUsage, TokenVelocity
from planner_workloads import Scenario, engine, scenarios
from rich.console import Console
from rich.table import Table

from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape, latencies
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise, parse_promises
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.autoscaler import Autoscaler
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.planning import SimulatedPlanner
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.formats.registry import load

BOUND_S = 60.0  # interval of the clairvoyant
Make = Callable[[], Autoscaler]
_known: list[Scenario] = []  # inherited by the processes that run them


@dataclass(frozen=True)
class Row:
    """One run: shares of 1, seconds, hours of devices (weighted by cost), counts."""

    scenario: str
    startup_s: float
    policy: str
    kept: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    hours: float
    goodput: float
    least: int
    most: int
    changes: int
    failed: int


def run(number: int, startup_s: float, policy: str) -> Row:
    """Simulate one policy on a scenario; `static N` is a fleet that does not change."""
    scenario = _known[number]
    fleet = scenario.kinds or (WorkerOptions(scenario.initial, engine()),)
    make: Make | None = None
    if policy.startswith("static"):
        fleet = (replace(fleet[0], count=int(policy.split()[1])), *fleet[1:])
    else:
        make = _autoscaler(scenario, startup_s, policy, len(fleet))
    options = SimulationOptions(
        router=RouterSettings(policy="kv"),
        workers=fleet,
        speed=scenario.speed,
        autoscaler=make,
        startup_s=startup_s,
    )
    simulation = Simulation(scenario.workload, options)
    simulation.run()
    return _row(scenario, startup_s, policy, simulation)


def _promises(scenario: Scenario) -> list[Promise]:
    return parse_promises("ttft", [scenario.ttft]) + parse_promises("itl", [scenario.itl])


def _autoscaler(scenario: Scenario, startup_s: float, policy: str, groups: int) -> Make:
    promises = _promises(scenario)
    if policy == "kvmesh":
        costs = [kind.cost for kind in scenario.kinds] or [1.0]
        pools = [
            Pool(f"pool-{n}", min=0 if n else 1, max=scenario.most, cost=cost)
            for n, cost in enumerate(costs)
        ]
        options = PlanOptions(promises=promises, startup_s=startup_s)
        return lambda: SimulatedPlanner(options, pools)
    ttft, itl = (promise.seconds for promise in promises)
    made: dict[str, Callable[[], Baseline]] = {
        "dynamo throughput": lambda: DynamoThresholds(1, scenario.most),
        "dynamo latency": lambda: DynamoThresholds(1, scenario.most, up=0.4, down=0.1),
        "dynamo sla": lambda: DynamoSla(1, scenario.most, ttft_s=ttft, itl_s=itl),
        "token velocity": lambda: TokenVelocity(1, scenario.most, ttft_s=ttft),
        "KV usage": lambda: KvUsage(1, scenario.most),
    }
    return made[policy]


def _row(scenario: Scenario, startup_s: float, policy: str, simulation: Simulation) -> Row:
    records, fleet = simulation.records, simulation.fleet.record
    ttft = records.column("first_token") - records.column("arrived")
    output = records.column("output")
    gaps = records.column("ended") - records.column("first_token")
    itl = np.where(output > 1, gaps / np.maximum(output - 1, 1), 0.0)
    bounds = [promise.seconds for promise in _promises(scenario)]
    good = (ttft <= bounds[0]) & (itl <= bounds[1])
    hours = fleet.cost_s / 3600
    sizes = [ready + starting for _, ready, starting in fleet.sizes[_initial(scenario) :]]
    sizes = sizes or [sum(kind.count for kind in simulation.options.workers)]
    return Row(
        scenario.name,
        startup_s,
        policy,
        float(np.mean(good)),
        float(np.nanmedian(ttft)),
        float(np.nanquantile(ttft, 0.99)),
        float(np.quantile(itl, 0.99)),
        hours,
        float(output[good].sum() / max(fleet.device_s, 1.0)),
        min(sizes),
        max(sizes),
        fleet.ups + fleet.downs,
        sum(error is not None for error in records.error),
    )


def _initial(scenario: Scenario) -> int:
    return sum(kind.count for kind in scenario.kinds) or scenario.initial


class TrueTimes:
    """The step times of the simulated engine itself."""

    def __init__(self, core: CoreOptions) -> None:
        self._core = core
        self._total = core.blocks * core.limits.block_size

    def prefill(self, tokens: int) -> float:
        return self._core.model.prefill(tokens) / self._core.speedup

    def decode(self, sequences: int, tokens: float) -> float:
        load = DecodeLoad(sequences, int(tokens), self._total)
        return self._core.model.decode(load) / self._core.speedup


def clairvoyant(number: int) -> float:
    """Hours of a fleet that follows the load without delay: the least one that keeps the promises.

    In every minute it has the fewest workers with which the requests of that minute, known in
    advance with their cached tokens, keep both promises. Its workers need no time to start.
    """
    scenario = _known[number]
    fleet = (scenario.kinds or (WorkerOptions(1, engine()),))[0]
    count = max(scenario.statics, default=16)
    options = SimulationOptions(
        router=RouterSettings(policy="kv"),
        workers=(replace(fleet, count=count),),
        speed=scenario.speed,
    )
    simulation = Simulation(scenario.workload, options)
    records = simulation.run()
    core = fleet.core
    kind = ModelledEngine(
        TrueTimes(core),
        core.limits.max_batched_tokens,
        core.limits.max_sequences,
        core.blocks * core.limits.block_size,
    )
    shapes = sorted(
        (
            RequestShape(
                records.arrived[n],
                max(r.input_tokens - records.cached[n], 1),
                r.input_tokens,
                r.output_tokens,
            )
            for n, r in enumerate(scenario.workload.rounds)
        ),
        key=lambda shape: shape.at,
    )
    end = max(ended for ended in records.ended)
    total, at = 0.0, 0.0
    least = 1
    while at < end:
        around = [s for s in shapes if at - BOUND_S <= s.at < at + BOUND_S]
        first = sum(shape.at < at for shape in around)
        least = 1
        while not _keeps(around, first, [kind] * least, _promises(scenario)):
            least += 1
        total += least * min(BOUND_S, end - at)
        at += BOUND_S
    return total * fleet.cost / 3600


def _keeps(
    shapes: list[RequestShape], first: int, workers: list[ModelledEngine], promises: list[Promise]
) -> bool:
    if len(shapes) == first or len(workers) >= 64:
        return True
    start = shapes[0].at
    found = latencies([replace(shape, at=shape.at - start) for shape in shapes], workers)
    for promise in promises:
        values = (found.ttft if promise.metric == "ttft" else found.itl)[first:]
        if np.mean([value <= promise.seconds for value in values]) < promise.quantile:
            return False
    return True


POLICIES = (
    "kvmesh",
    "dynamo throughput",
    "dynamo latency",
    "dynamo sla",
    "token velocity",
    "KV usage",
)


def _show(rows: list[Row], bounds: dict[str, float]) -> None:
    table = Table(title="Planner, in virtual time", title_justify="left")
    for name in ("scenario", "start-up s", "policy", "kept %", "TTFT p50 s", "p99 s", "ITL p99 ms"):
        table.add_column(name, justify="left" if name in ("scenario", "policy") else "right")
    for name in ("device-hours", "× bound", "goodput tok/s", "fleet", "changes", "failed"):
        table.add_column(name, justify="right")
    for row in rows:
        bound = bounds.get(row.scenario)
        table.add_row(
            row.scenario,
            f"{row.startup_s:g}",
            row.policy,
            f"{row.kept:.1%}"[:-1],
            f"{row.ttft_p50:.2f}",
            f"{row.ttft_p99:.1f}",
            f"{row.itl_p99 * 1000:.0f}",
            f"{row.hours:.2f}",
            f"{row.hours / bound:.2f}" if bound else "",
            f"{row.goodput:.1f}",
            f"{row.least}–{row.most}",
            str(row.changes),
            str(row.failed),
        )
    Console(width=160).print(table)


def _runs(
    scenario: Scenario, startups: str, policies: str | None
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Policies by start-up time; static fleets need none, so they run once."""
    chosen = tuple(policies.split(",")) if policies else POLICIES
    for number, startup in enumerate(startups.split(",")):
        statics = () if number else tuple(f"static {n}" for n in scenario.statics)
        yield float(startup), (*statics, *chosen)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace")
    arguments.add_argument("--only", metavar="NAME,…", help="only these scenarios")
    arguments.add_argument("--policies", metavar="NAME,…", help="only these policies")
    arguments.add_argument("--startup", default="60,200", metavar="S,…", help="start-up times")
    arguments.add_argument("--seed", type=int, default=1, metavar="N")
    arguments.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (2)")
    chosen = arguments.parse_args()
    known = scenarios(chosen.seed)
    if chosen.trace is not None and chosen.trace.exists():
        trace, _ = load(str(chosen.trace))
        for speed, initial, statics in (
            (1, 3, (2, 3, 4, 8)),
            (3, 5, (4, 5, 6, 8, 12)),
            (6, 9, (8, 9, 10, 12, 16)),
        ):
            known.append(
                Scenario(
                    f"conversation ×{speed}", trace, itl="p95=60ms", speed=speed,
                    initial=initial, flat=True, statics=statics,
                )
            )  # fmt: skip
    else:
        print("skipping the conversation trace: --trace names none")
    if chosen.only:
        known = [s for s in known if any(s.name.startswith(o) for o in chosen.only.split(","))]
    _known[:] = known
    with ProcessPoolExecutor(chosen.jobs, get_context("fork")) as pool:
        bounds = {
            scenario.name: pool.submit(clairvoyant, place)
            for place, scenario in enumerate(known)
            if len(scenario.kinds) < 2
        }
        waiting = [
            pool.submit(run, place, startup, policy)
            for place, scenario in enumerate(known)
            for startup, policies in _runs(scenario, chosen.startup, chosen.policies)
            for policy in policies
        ]
        for number, each in enumerate(as_completed(waiting), 1):
            row = each.result()
            progress = f"{number}/{len(waiting)} {row.scenario}, {row.startup_s:g} s, {row.policy}"
            print(f"{progress}: {row.kept:.1%}, {row.hours:.2f} h", file=sys.stderr, flush=True)
        rows = [each.result() for each in waiting]
        least = {name: each.result() for name, each in bounds.items()}
    _show(rows, least)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
