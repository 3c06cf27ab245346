"""The end of a comparison in words: hits, times, and the workers that promises take."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.report.figures import Figures
from kvmesh.simulator.sizing.fleets import WorkerKind
from kvmesh.simulator.sizing.search import size_fleet
from kvmesh.simulator.sizing.verdict import PromiseWatch
from kvmesh.workload.model import Workload

MOST_WORKERS = 1024
HINT = (
    "--planner-ttft p95=2s adds the share of requests that keep a promise, and the workers for it"
)

Run = tuple[Simulation, Figures]


def answer(workload: Workload, runs: Sequence[Run], promises: Sequence[Promise]) -> Iterator[str]:
    """A line per policy, the best cached share first, and a line per policy about promises.

    Searches fleets of other sizes if there are promises: several more simulations.
    """
    best = sorted(runs, key=lambda run: -run[1].cache.cached_share)
    for simulation, figures in best:
        yield f"{figures.policy}, {_fleet(simulation.options)}: {_service(figures)}"
    if not promises:
        yield HINT
        return
    for simulation, figures in best:
        yield f"{figures.policy}: {_kept(workload, simulation, promises)}"


def _fleet(options: SimulationOptions) -> str:
    count = sum(group.count for group in options.workers)
    return f"{count:,} workers" if count != 1 else "1 worker"


def _service(figures: Figures) -> str:
    cache = figures.cache
    computed = cache.prompt_tokens - cache.cached_tokens
    parts = [
        f"{cache.cached_share:.1%} of the prompt tokens are hits (ideal {cache.ideal_share:.1%}), "
        f"{computed:,} of {cache.prompt_tokens:,} are computed"
    ]
    ttft = figures.latency.ttft_s
    if ttft is not None:
        parts.append(f"TTFT p50 {_time(ttft.p50)}, p95 {_time(ttft.p95)}")
    if figures.failed:
        parts.append(f"{figures.failed:,} requests fail")
    return "; ".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _kept(workload: Workload, simulation: Simulation, promises: Sequence[Promise]) -> str:
    watch = PromiseWatch(promises, len(workload), whole=True)
    shares, _ = watch.outcome(simulation.records)
    kept = ", ".join(f"{p} for {share:.1%}" for p, share in zip(promises, shares, strict=True))
    return f"keeps {kept} of the requests; {_needed(workload, simulation.options, promises)}"


def _needed(workload: Workload, options: SimulationOptions, promises: Sequence[Promise]) -> str:
    if len(options.workers) > 1 or options.nodes or options.faults or options.autoscaler:
        return "kvmesh plan size searches fleets of several kinds"
    (group,) = options.workers
    kind = WorkerKind("worker", group, MOST_WORKERS)
    found = size_fleet(workload, [kind], promises, options, near=(group.count,))
    if found is None:
        return "more workers do not help"
    needed = _fleet(replace(options, workers=(replace(group, count=found.counts[0]),)))
    return f"{needed} would be enough"
