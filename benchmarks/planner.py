"""The planner beside static fleets, Dynamo's planner, llm-d, KEDA and a clairvoyant."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from common import parser
from planner_baselines import Baseline, DynamoSla, DynamoThresholds, KvUsage, TokenVelocity
from planner_clairvoyant import ToldInAdvance, clairvoyant
from planner_dynamo import DynamoError, dynamo_itself
from planner_rows import (
    ASLEEP,
    ITSELF,
    LOOSE,
    PARKED,
    PLANNER,
    SLA,
    TOLD,
    Row,
    show,
    show_targets,
)
from planner_workloads import Scenario, engine, scenarios, tracelab

from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise, parse_promises
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.autoscaler import Autoscaler
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.planning import SimulatedPlanner
from kvmesh.workload.formats.registry import load

CONVERSATION = "conversation ×"
DYNAMO_TARGETS = ("throughput", "latency", "sla")
PROMOTION = 0.25  # of a start
# workers that wait beside those that serve: so many parked, and up to so many asleep
WAITING = {PARKED: (2, 0), ASLEEP: (0, 32)}
Make = Callable[[], Autoscaler]
_known: list[Scenario] = []  # inherited by the processes that run them


def run(number: int, startup_s: float, policy: str) -> Row:
    """Simulate one policy on a scenario; `static N` is a fleet that does not change."""
    scenario = _known[number]
    fleet = scenario.kinds or (WorkerOptions(scenario.initial, engine()),)
    if policy.startswith("static"):
        fleet = (replace(fleet[0], count=int(policy.split()[1])), *fleet[1:])
        return _simulated(scenario, startup_s, policy, fleet, None)
    parked, asleep = WAITING.get(policy, (0, 0))
    fleet = tuple(replace(kind, parked=parked, sleeps=asleep > 0) for kind in fleet)
    make = _autoscaler(scenario, startup_s, policy)
    return _simulated(scenario, startup_s, policy, fleet, make)


def foresight(number: int, startups: Sequence[float]) -> tuple[float, list[Row]]:
    """The bound of a scenario in hours, and its workers simulated for each start-up time."""
    scenario = _known[number]
    best = clairvoyant(scenario, _promises(scenario))
    fleet = (scenario.kinds or (WorkerOptions(1, engine()),))[0]
    first = (replace(fleet, count=best.needs[0]),)
    return best.hours, [
        _simulated(scenario, startup, TOLD, first, partial(ToldInAdvance, best.needs, startup))
        for startup in startups
    ]


def _simulated(
    scenario: Scenario,
    startup_s: float,
    policy: str,
    fleet: tuple[WorkerOptions, ...],
    make: Make | None,
) -> Row:
    options = SimulationOptions(
        router=RouterSettings(policy="kv"),
        workers=fleet,
        speed=scenario.speed,
        autoscaler=make,
        startup_s=startup_s,
        promotion_s=startup_s * PROMOTION,
    )
    simulation = Simulation(scenario.workload, options)
    simulation.run()
    return _row(scenario, startup_s, policy, simulation)


def _promises(scenario: Scenario) -> list[Promise]:
    return parse_promises("ttft", [scenario.ttft]) + parse_promises("itl", [scenario.itl])


def _autoscaler(scenario: Scenario, startup_s: float, policy: str) -> Make:
    promises = _promises(scenario)
    if policy == PLANNER or policy in WAITING:
        parked, asleep = WAITING.get(policy, (0, 0))
        costs = [kind.cost for kind in scenario.kinds] or [1.0]
        pools = [
            Pool(
                f"pool-{n}",
                min=0 if n else 1,
                max=scenario.most,
                cost=cost,
                parked=parked,
                asleep=asleep,
            )
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
    initial = sum(kind.count for kind in simulation.options.workers)
    sizes = [ready + starting for _, ready, starting in fleet.sizes[initial:]] or [initial]
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
        max(records.ended) / 3600,
        scenario.flat,
        fleet.waited_s / 3600,
    )


POLICIES = (
    PLANNER,
    *WAITING,
    "dynamo throughput",
    "dynamo latency",
    SLA,
    "token velocity",
    "KV usage",
)


def _runs(
    scenario: Scenario, startups: str, policies: str | None
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Policies by start-up time; static fleets need none, so they run once."""
    chosen = tuple(policies.split(",")) if policies else ("static", *POLICIES)
    if scenario.name.endswith(LOOSE):
        chosen = tuple(policy for policy in chosen if policy in (PLANNER, SLA))
    statics = tuple(f"static {n}" for n in scenario.statics) if "static" in chosen else ()
    for number, startup in enumerate(startups.split(",")):
        others = tuple(policy for policy in chosen if policy not in ("static", ITSELF))
        yield float(startup), ((*statics, *others) if not number else others)


def _scenarios(chosen: Namespace) -> list[Scenario]:
    """All scenarios for which there is data, then those that are chosen."""
    known = scenarios(chosen.seed)
    looser = next(s for s in known if s.name == "burst")
    known.append(replace(looser, name=looser.name + LOOSE, ttft="p95=50s", itl="p95=2500ms"))
    if chosen.tracelab is not None and chosen.tracelab.exists():
        known.append(tracelab(chosen.tracelab, chosen.seed))
    else:
        print("skipping the TraceLab sessions: --tracelab names none", file=sys.stderr)
    if chosen.trace is not None and chosen.trace.exists():
        trace, _ = load(str(chosen.trace))
        for speed, initial, statics in (
            (1, 3, (2, 3, 4, 8)),
            (3, 5, (4, 5, 6, 8, 12)),
            (6, 9, (8, 9, 10, 12, 16)),
        ):
            known.append(
                Scenario(
                    f"{CONVERSATION}{speed}", trace, itl="p95=60ms", speed=speed,
                    initial=initial, flat=True, statics=statics,
                )
            )  # fmt: skip
    else:
        print("skipping the conversation trace: --trace names none", file=sys.stderr)
    if chosen.only:
        named = chosen.only.split(",")
        known = [s for s in known if any(s.name.startswith(name) for name in named)]
    return known


def _dynamo(
    pool: ProcessPoolExecutor, chosen: Namespace, known: list[Scenario]
) -> list[Future[Row]]:
    """Runs of Dynamo's own planner on the conversation trace."""
    if chosen.dynamo is None or ITSELF not in (chosen.policies or ITSELF).split(","):
        return []
    return [
        pool.submit(
            dynamo_itself, chosen.dynamo, chosen.trace, scenario, float(startup), target, number
        )
        for scenario in known
        if scenario.name.startswith(CONVERSATION)
        for startup in chosen.startup.split(",")
        for target in DYNAMO_TARGETS
        for number in range(1, chosen.dynamo_runs + 1)
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace")
    arguments.add_argument("--tracelab", type=Path, metavar="FILE", help="sessions of TraceLab")
    arguments.add_argument("--dynamo", type=Path, metavar="VENV", help="an installation of Dynamo")
    arguments.add_argument("--dynamo-runs", type=int, default=3, metavar="N", help="of each (3)")
    arguments.add_argument("--only", metavar="NAME,…", help="only these scenarios")
    arguments.add_argument("--policies", metavar="NAME,…", help="only these; static: static fleets")
    arguments.add_argument("--startup", default="60,200", metavar="S,…", help="start-up times")
    arguments.add_argument("--seed", type=int, default=1, metavar="N")
    arguments.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (2)")
    chosen = arguments.parse_args()
    if chosen.dynamo is not None and not (chosen.dynamo / "bin" / "python").exists():
        arguments.error(f"--dynamo {chosen.dynamo}: no virtual environment there")
    unknown = set((chosen.policies or "static").split(",")) - {"static", ITSELF, *POLICIES}
    if unknown:
        arguments.error(f"--policies: unknown {', '.join(sorted(unknown))}")
    began = time.monotonic()
    known = _scenarios(chosen)
    _known[:] = known
    with ProcessPoolExecutor(chosen.jobs, get_context("fork")) as pool:
        waiting = [
            pool.submit(run, place, startup, policy)
            for place, scenario in enumerate(known)
            for startup, policies in _runs(scenario, chosen.startup, chosen.policies)
            for policy in policies
        ]
        waiting += _dynamo(pool, chosen, known)
        startups = [float(startup) for startup in chosen.startup.split(",")]
        bounds = {
            scenario.name: pool.submit(foresight, place, startups)
            for place, scenario in enumerate(known)
            if len(scenario.kinds) < 2 and not scenario.name.endswith(LOOSE)
            if PLANNER in (chosen.policies or PLANNER).split(",")
        }
        for number, each in enumerate(as_completed(waiting), 1):
            if not isinstance(each.exception(), DynamoError):
                row = each.result()
                what = f"{row.scenario}, {row.startup_s:g} s, {row.policy}"
                figures = f"{row.kept:.1%}, {row.hours:.2f} h"
                print(f"{number}/{len(waiting)} {what}: {figures}", file=sys.stderr, flush=True)
        refused = {str(error) for each in waiting if (error := each.exception())}
        rows = [each.result() for each in waiting if each.exception() is None]
        least = {name: each.result()[0] for name, each in bounds.items()}
        rows += [row for each in bounds.values() for row in each.result()[1]]
    for reason in sorted(refused):
        print(f"Dynamo's planner did not run: {reason}", file=sys.stderr)
    show(rows, least)
    show_targets(rows, least)
    print(f"{len(rows)} runs in {(time.monotonic() - began) / 60:.0f} min, {chosen.jobs} at a time")
    if chosen.json:
        bounds_of = [{"scenario": name, "bound": hours} for name, hours in least.items()]
        chosen.json.write_text(json.dumps([asdict(row) for row in rows] + bounds_of, indent=1))


if __name__ == "__main__":
    main()
