"""The policy `kv` without a set weight on the conversation trace, beside fixed weights and bounds.

Each fleet replays the whole trace in virtual time: under `kv` as by default; with each request
placed alone, also under fixed values of `prefill_weight`; without regard to load and cache; and on
one engine with the memory and speed of all, whose hits are those of one LRU cache. The column of
Dynamo is its own offline replay (1.6) of the same trace and fleet with `prefill_load_scale` 16,
which was run apart.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from common import Report, parser

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload

BLOCK = 64
LIMITS = SchedulerLimits(block_size=BLOCK, max_sequences=256, max_batched_tokens=8192)
UNITS = {"cached": "%", "TTFT mean": "ms", "TTFT p50": "ms", "latency": "ms"}


class Fleet(NamedTuple):
    """Engines of `blocks` blocks at a speed of the trace; `dynamo` has its figures by name."""

    engines: int
    blocks: int
    speed: float
    dynamo: dict[str, float]

    def __str__(self) -> str:
        return f"{self.engines} × {self.blocks:,} blocks, speed {self.speed:g}"


FLEETS = (
    Fleet(8, 16_384, 1.0, {"cached": 24.2, "TTFT mean": 244, "latency": 2726}),
    Fleet(8, 65_536, 2.0, {"cached": 33.3, "TTFT mean": 227, "latency": 2617}),
    Fleet(4, 16_384, 1.0, {"cached": 16.1, "TTFT mean": 401, "latency": 3842}),
)


def replay(
    trace: Workload, fleet: Fleet, router: RouterSettings, routers: int, united: bool
) -> dict[str, float]:
    """The figures of one run with so many routers, in the units of UNITS."""
    share = fleet.engines if united else 1
    core = CoreOptions(fleet.blocks * share, LIMITS, speedup=float(share))
    simulation = Simulation(
        trace,
        SimulationOptions(
            router=router,
            workers=(WorkerOptions(fleet.engines // share, core),),
            replicas=routers,
            speed=fleet.speed,
            deadline_s=7200.0,
        ),
    )
    records = simulation.run()
    arrived, first, ended = (records.column(n) for n in ("arrived", "first_token", "ended"))
    engines = simulation.worker_records.values()
    cached = sum(engine.cached_tokens for engine in engines)
    return {
        "cached": 100 * cached / sum(engine.prompt_tokens for engine in engines),
        "TTFT mean": 1000 * float(np.nanmean(first - arrived)),
        "TTFT p50": 1000 * float(np.nanmedian(first - arrived)),
        "latency": 1000 * float(np.nanmean(ended - arrived)),
    }


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--trace", type=Path, metavar="FILE", required=True)
    arguments.add_argument("--weights", default="3,16", metavar="W,…", help="fixed weights")
    arguments.add_argument("--routers", type=int, default=1, metavar="N", help="routers (1)")
    arguments.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    chosen = arguments.parse_args()
    trace, _ = load(str(chosen.trace))
    trace = msgspec.structs.replace(trace, rounds=trace.rounds[: chosen.limit])
    policies = {
        "kv": RouterSettings(policy="kv"),
        "kv, one by one": RouterSettings(policy="kv", gather_s=0.0),
    }
    for weight in map(float, chosen.weights.split(",")):
        policies[f"kv, {weight:g}"] = RouterSettings(
            policy="kv", prefill_weight=weight, gather_s=0.0
        )
    policies["round-robin"] = RouterSettings(policy="round-robin", gather_s=0.0)
    report = Report("Placement (virtual time)", "Dynamo, 16")
    for fleet in FLEETS:
        bound = replay(trace, fleet, policies["kv"], chosen.routers, united=True)["cached"]
        for name, router in policies.items():
            found = replay(trace, fleet, router, chosen.routers, united=False)
            for what, value in found.items():
                theirs = fleet.dynamo.get(what) if name == "kv" and chosen.limit is None else None
                goal = ""
                if name == "kv" and what == "cached":
                    goal = f"{bound:.1f} (one cache)"
                baseline = "" if theirs is None else f"{theirs:g}"
                report.add(f"{fleet}: {name}: {what}", value, UNITS[what], baseline, goal)
            print(f"{fleet}: {name}: {found}", file=sys.stderr, flush=True)
    report.finish("placement: kv without a weight, fixed weights, and one cache", chosen.json)


if __name__ == "__main__":
    main()
