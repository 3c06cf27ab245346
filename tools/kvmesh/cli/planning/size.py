"""`kvmesh plan size`: the cheapest fleet for a number of developers, before buying it."""

import argparse
import sys
from collections import Counter
from math import inf
from typing import Annotated

import msgspec
from msgspec.structs import replace as replace_profile
from rich.console import Console
from rich.table import Table

from kvmesh.cli.arguments import positive, seconds
from kvmesh.cli.scenario import mock_core
from kvmesh.planner.core.promises import Promise, parse_promises
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.router.config import check_settings
from kvmesh.router.errors import RouterConfigError
from kvmesh.settings import Settings
from kvmesh.simulator.options import SimulationError, SimulationOptions, WorkerOptions
from kvmesh.simulator.sizing import SizedFleet, WorkerKind, size_fleet
from kvmesh.step_times.profile import StepProfileError
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Workload

HELP = "find the cheapest fleet for a number of developers or a workload"
BLOCK_SIZE = 64
RAMP_MINUTES = 10.0
SESSIONS = 2  # per developer and agent: the run lasts until all have ended


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh plan size [WORKLOAD] [--developers N] --ttft p95=2s [options]"
    parser.epilog = (
        "Simulates fleets and reports the cheapest that keeps the promises, once per seed. Engines"
        " are those of the [mock] settings; --mock-profile and --mock-speedup set their speed."
    )
    parser.add_argument(
        "source",
        nargs="?",
        default="coding-agents",
        metavar="WORKLOAD",
        help="a profile of developers, or a trace (coding-agents)",
    )
    parser.add_argument(
        "--developers", type=positive, metavar="N", help="developers at work at the same time"
    )
    parser.add_argument(
        "--agents", type=positive, default=1, metavar="N", help="agents of each, side by side (1)"
    )
    parser.add_argument(
        "--speed", type=seconds, default=1.0, metavar="X", help="a trace X times faster (1)"
    )
    for metric in ("ttft", "itl", "queue"):
        parser.add_argument(
            f"--{metric}", default="", metavar="pQQ=TIME", help=f"promised {metric}, such as p95=2s"
        )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="NAME[:KEY=VALUE,…]",
        help="a kind of worker with speedup, blocks, cost (per hour) and max; repeatable",
    )
    parser.add_argument(
        "--seeds", type=positive, default=3, metavar="N", help="simulated developers' days (3)"
    )


class _Kind(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of --kind."""

    speedup: Annotated[float, msgspec.Meta(gt=0)] | None = None
    blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cost: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64


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
        kinds = [_kind(text, settings) for text in arguments.kind or ["worker"]]
        workloads = [_workload(arguments, seed) for seed in range(arguments.seeds)]
        return _size(arguments, settings, workloads, kinds, promises)
    except (
        PlannerConfigError, WorkloadError, SimulationError, RouterConfigError, StepProfileError,
        OSError,
    ) as error:  # fmt: skip
        print(f"kvmesh plan size: {error}", file=sys.stderr)
        return 2


def _workload(arguments: argparse.Namespace, seed: int) -> Workload:
    """The workload of one seed; developers scale a profile, not a trace."""
    if arguments.developers is None:
        return load(arguments.source, seed=seed)[0]
    if not arguments.source.endswith(".toml") and "." in arguments.source:
        raise WorkloadError("--developers needs a profile; --speed scales a trace")
    profile = load_profile(arguments.source)
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


def _kind(text: str, settings: Settings) -> WorkerKind:
    name, _, rest = text.partition(":")
    try:
        pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
        kind = msgspec.convert(pairs, _Kind, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise SimulationError(f"--kind {text}: {error}") from None
    mock = settings.mock
    changed = {
        key: value for key in ("speedup", "blocks") if (value := getattr(kind, key)) is not None
    }
    core = mock_core(msgspec.structs.replace(mock, **changed), BLOCK_SIZE)
    return WorkerKind(name, WorkerOptions(1, core, cost=kind.cost), kind.max)


def _size(
    arguments: argparse.Namespace,
    settings: Settings,
    workloads: list[Workload],
    kinds: list[WorkerKind],
    promises: list[Promise],
) -> int:
    console = Console()
    options = SimulationOptions(router=settings.router, speed=arguments.speed)
    found: list[SizedFleet | None] = []
    table = Table()
    for name in ("seed", "requests", "fleet", "cost/h", *map(str, promises)):
        table.add_column(name, justify="left" if name == "fleet" else "right")
    for seed, workload in enumerate(workloads):

        def show(fleet: SizedFleet, seed: int = seed, workload: Workload = workload) -> None:
            table.add_row(
                str(seed),
                f"{len(workload):,}",
                _text(fleet, kinds),
                f"{fleet.cost:g}",
                *(f"{share:.1%}" for share in fleet.shares),
                style=None if fleet.keeps else "dim",
            )

        found.append(size_fleet(workload, kinds, promises, options, show))
    console.print(table)
    kept = [fleet for fleet in found if fleet is not None]
    if not kept:
        reason = "no fleet keeps the promises: more workers do not help, or --kind permits no more"
        print(f"kvmesh plan size: {reason}", file=sys.stderr)
        return 1
    worst = max(found, key=lambda fleet: fleet.cost if fleet is not None else inf)
    answers = Counter(_text(fleet, kinds) for fleet in kept)
    spread = ", ".join(f"{text} in {n} of {len(found)} runs" for text, n in answers.most_common())
    if worst is None:
        print(f"{spread}; in the others no fleet keeps the promises")
        return 1
    print(f"enough in every run: {_text(worst, kinds)}, {worst.cost:g} per hour ({spread})")
    return 0


def _text(fleet: SizedFleet, kinds: list[WorkerKind]) -> str:
    return ", ".join(
        f"{count} {kind.name}" for count, kind in zip(fleet.counts, kinds, strict=True) if count
    )
