"""`kvmesh plan size`: the cheapest fleet for a number of developers, before buying it."""

import argparse
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from msgspec.structs import replace as replace_profile

from kvmesh.bus.client import Bus
from kvmesh.cli.arguments import add_since, failed, positive, seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.planning.kinds import HELP as KIND_HELP
from kvmesh.cli.planning.kinds import tier_choices
from kvmesh.cli.planning.size_answer import SizeAnswer
from kvmesh.cli.planning.size_runs import SeedRuns
from kvmesh.cli.traces.options import add_trace_options, load_trace
from kvmesh.planner.core.promises import parse_promises
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.router.config import check_settings
from kvmesh.router.errors import RouterConfigError
from kvmesh.settings import Settings
from kvmesh.simulator.options import SimulationError, SimulationOptions
from kvmesh.step_times.profile import StepProfileError
from kvmesh.workload.capture import CapturedRound, assemble, capture
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import builtin, load_profile
from kvmesh.workload.generate.scaling import scale_sessions
from kvmesh.workload.model import Workload

HELP = "find the cheapest fleet for a number of developers or a workload"
RAMP_MINUTES = 10.0
SESSIONS = 2  # per developer and agent: the run lasts until all have ended


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvmesh plan size [WORKLOAD … | --since 1h] [--developers N | --scale X] --ttft p95=2s"
        " [--profile NAME] [options]"
    )
    parser.epilog = (
        "Simulates fleets and reports the cheapest that keeps the promises in each run. A run is"
        " another set of developers, or of sessions drawn from the trace. Engines are those of the"
        " [mock] settings, with the step times and limits of --profile."
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="WORKLOAD",
        help="a profile of developers, or a trace in files or folders (coding-agents)",
    )
    add_trace_options(parser)
    add_since(
        parser, "the requests of a live mesh since then instead: 90s, 5m, 2h, 1d ago or a time"
    )
    parser.add_argument("--model", metavar="NAME", help="--since: only requests of this model")
    parser.add_argument(
        "--developers", type=positive, metavar="N", help="developers at work at the same time"
    )
    parser.add_argument(
        "--agents", type=positive, default=1, metavar="N", help="agents of each, side by side (1)"
    )
    parser.add_argument(
        "--scale", type=seconds, metavar="X",
        help="X times as many sessions as in the trace, at their own pace (1)",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=seconds, default=1.0, metavar="X", help="a trace X times faster (1)"
    )
    for metric in ("ttft", "itl", "queue"):
        parser.add_argument(
            f"--{metric}", default="", metavar="pQQ=TIME", help=f"promised {metric}, such as p95=2s"
        )
    parser.add_argument(
        "--profile",
        default="",
        metavar="NAME",
        help="step times: a shipped name (kvmesh plan profiles), NPZ or TOML file",
    )
    parser.add_argument(
        "--kind", action="append", default=[], metavar="NAME[:KEY=VALUE,…]", help=KIND_HELP
    )
    parser.add_argument(
        "--seeds", type=positive, default=3, metavar="N", help="runs, each with another seed (3)"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        promises = [
            promise
            for metric in ("ttft", "itl", "queue")
            for promise in parse_promises(metric, [t for t in (getattr(arguments, metric),) if t])
        ]
        if not promises:
            raise PlannerConfigError("name at least one promise, such as --ttft p95=2s")
        check_settings(settings.router)
        choices = tier_choices(arguments.kind, arguments.profile, settings.mock)
        workloads = _workloads(arguments, settings)
        if workloads is None:
            return 1
        options = SimulationOptions(router=settings.router, speed=arguments.speed)
        runs = SeedRuns(choices, promises, options, sys.stderr.isatty())
        return SizeAnswer(promises, options).show(runs.size(workloads))
    except (
        PlannerConfigError, WorkloadError, SimulationError, RouterConfigError, StepProfileError,
        BrokenProcessPool, OSError,
    ) as error:  # fmt: skip
        return failed("plan size", error, 2)


def _workloads(arguments: argparse.Namespace, settings: Settings) -> list[Workload] | None:
    """The workload of each seed; None if the bus has none, with the reason printed."""
    if arguments.since is not None:
        if arguments.sources or arguments.developers is not None:
            raise WorkloadError("--since excludes a workload and --developers")
        captured: list[CapturedRound] = []

        async def read(bus: Bus) -> int:
            recorder = await capture(bus, arguments.since, arguments.model)
            captured.extend(recorder.rounds)
            return 0

        if run_on_bus("plan size", settings, read):
            return None
        return _drawn(arguments, assemble(captured))
    sources = arguments.sources or ["coding-agents"]
    source = sources[0]
    generated = len(sources) == 1 and (source in builtin() or source.endswith(".toml"))
    if arguments.developers is not None:
        if not generated:
            raise WorkloadError("--developers needs a profile; --scale scales a trace")
        if arguments.scale is not None:
            raise WorkloadError("--scale excludes --developers")
        return [_developers(arguments, source, seed) for seed in range(arguments.seeds)]
    if generated and not Path(source).is_file() and arguments.scale is None:
        return [load(source, seed=seed)[0] for seed in range(arguments.seeds)]
    return _drawn(arguments, load_trace(arguments, sources)[0])


def _drawn(arguments: argparse.Namespace, workload: Workload) -> list[Workload]:
    """The workload with as many sessions as wanted, drawn anew with each seed but the first."""
    scale = arguments.scale or 1.0
    return [scale_sessions(workload, scale, seed) for seed in range(arguments.seeds)]


def _developers(arguments: argparse.Namespace, source: str, seed: int) -> Workload:
    profile = load_profile(source)
    agents = arguments.developers * arguments.agents
    return AgentGenerator(
        replace_profile(
            profile,
            concurrency=agents,
            sessions=SESSIONS * agents,
            per_minute=max(agents / RAMP_MINUTES, 0.1),
        ),
        seed,
    ).workload()
