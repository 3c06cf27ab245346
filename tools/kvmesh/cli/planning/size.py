"""`kvmesh plan size`: the cheapest fleet for a number of developers, before buying it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from msgspec.structs import replace as replace_profile
from rich.console import Console
from rich.table import Table

from kvmesh.bus.client import Bus
from kvmesh.cli.arguments import moment, positive, seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.planning.kinds import HELP as KIND_HELP
from kvmesh.cli.planning.kinds import TieredKind, tier_choices
from kvmesh.planner.core.promises import Promise, parse_promises
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.router.config import check_settings
from kvmesh.router.errors import RouterConfigError
from kvmesh.settings import Settings
from kvmesh.simulator.options import SimulationError, SimulationOptions
from kvmesh.simulator.sizing import SizedFleet, simulate_fleet, size_fleet
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
HOURS = 730  # of a month


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvmesh plan size [WORKLOAD | --since 1h] [--developers N | --scale X] --ttft p95=2s"
        " [--profile NAME] [options]"
    )
    parser.epilog = (
        "Simulates fleets and reports the cheapest that keeps the promises in each run. A run is"
        " another set of developers, or of sessions drawn from the trace. Engines are those of the"
        " [mock] settings, with the step times and limits of --profile."
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="WORKLOAD",
        help="a profile of developers, or a trace (coding-agents)",
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="AGO",
        help="the requests of a live mesh since then instead: 90s, 5m, 2h, 1d ago or a time",
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
        return _Sizing(choices, promises, options).run(workloads)
    except (
        PlannerConfigError, WorkloadError, SimulationError, RouterConfigError, StepProfileError,
        OSError,
    ) as error:  # fmt: skip
        print(f"kvmesh plan size: {error}", file=sys.stderr)
        return 2


def _workloads(arguments: argparse.Namespace, settings: Settings) -> list[Workload] | None:
    """The workload of each seed; None if the bus has none, with the reason printed."""
    if arguments.since is not None:
        if arguments.source is not None or arguments.developers is not None:
            raise WorkloadError("--since excludes a workload and --developers")
        captured: list[CapturedRound] = []

        async def read(bus: Bus) -> int:
            recorder = await capture(bus, arguments.since, arguments.model)
            captured.extend(recorder.rounds)
            return 0

        if run_on_bus("plan size", settings, read):
            return None
        return _drawn(arguments, assemble(captured))
    source = arguments.source or "coding-agents"
    generated = source in builtin() or source.endswith(".toml")
    if arguments.developers is not None:
        if not generated:
            raise WorkloadError("--developers needs a profile; --scale scales a trace")
        if arguments.scale is not None:
            raise WorkloadError("--scale excludes --developers")
        return [_developers(arguments, source, seed) for seed in range(arguments.seeds)]
    if generated and not Path(source).is_file() and arguments.scale is None:
        return [load(source, seed=seed)[0] for seed in range(arguments.seeds)]
    return _drawn(arguments, load(source)[0])


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


Chosen = tuple[TieredKind, ...]


@dataclass
class _Run:
    """The answer of one seed: the cheapest fleet and its kinds, and all fleets tried."""

    workload: Workload
    kinds: Chosen
    fleet: SizedFleet | None = None
    tried: list[tuple[Chosen, SizedFleet]] = field(default_factory=list)


class _Sizing:
    """Sizes the fleet for each workload, and checks the largest answer on all of them."""

    def __init__(
        self, choices: list[Chosen], promises: list[Promise], options: SimulationOptions
    ) -> None:
        self._choices = choices
        self._promises = promises
        self._options = options
        self._console = Console()

    def run(self, workloads: Sequence[Workload]) -> int:
        """Print the answer; returns 0, or 1 if no fleet keeps the promises in every run."""
        table = Table()
        for name in ("seed", "requests", "fleet", "cost/h", *map(str, self._promises)):
            table.add_column(name, justify="left" if name == "fleet" else "right")
        runs = [self._cheapest(workload) for workload in workloads]
        for seed, each in enumerate(runs):
            if each.fleet is not None:
                table.add_row(
                    str(seed), f"{len(each.workload):,}", _text(each.fleet, each.kinds),
                    f"{each.fleet.cost:g}", *(f"{share:.1%}" for share in each.fleet.shares),
                )  # fmt: skip
        self._console.print(table)
        if any(each.fleet is None for each in runs):
            return self._none(runs)
        largest = max(runs, key=lambda each: each.fleet.cost if each.fleet else inf)
        assert largest.fleet is not None
        self._answer(largest, largest.fleet, runs)
        return 0

    def _cheapest(self, workload: Workload) -> _Run:
        """The cheapest fleet over all choices of tiers."""
        best = _Run(workload, self._choices[0])
        for chosen in self._choices:

            def show(fleet: SizedFleet, chosen: Chosen = chosen) -> None:
                best.tried.append((chosen, fleet))
                if sys.stderr.isatty():
                    shares = ", ".join(f"{share:.1%}" for share in fleet.shares)
                    print(f"tried {_text(fleet, chosen)}: {shares}", file=sys.stderr)

            found = size_fleet(
                workload,
                [each.kind for each in chosen],
                self._promises,
                self._options,
                show,
                best.fleet.cost if best.fleet is not None else inf,
            )
            if found is not None:
                best.fleet, best.kinds = found, chosen
        return best

    def _none(self, runs: list[_Run]) -> int:
        failed = next(each for each in runs if each.fleet is None)
        chosen, most = max(failed.tried, key=lambda each: min(each[1].shares))
        reason = "no fleet keeps the promises: more workers do not help, or --kind permits no more"
        print(
            f"kvmesh plan size: {reason}; {_text(most, chosen)} keep {self._kept([most])}",
            file=sys.stderr,
        )
        return 1

    def _answer(self, largest: _Run, fleet: SizedFleet, runs: list[_Run]) -> None:
        """The answer in words: the fleet, its costs, what it keeps, and why a smaller one fails."""
        name = _text(fleet, largest.kinds)
        results = [self._on(each, largest.kinds, fleet) for each in runs]
        kept = sum(result.keeps for result in results)
        equal = sum(_text(each.fleet, each.kinds) == name for each in runs if each.fleet)
        lines = [
            f"{name}: {fleet.cost:g} per hour, {fleet.cost * HOURS:,.0f} per month; the cheapest"
            f" fleet in {equal} of {len(runs)} runs",
            f"it keeps the promises in {kept} of {len(runs)} runs: {self._kept(results)}",
        ]
        smaller = [
            (chosen, tried)
            for each in runs
            for chosen, tried in each.tried
            if not tried.keeps and tried.cost < fleet.cost
        ]
        if smaller:
            chosen, next_one = max(smaller, key=lambda each: each[1].cost)
            lines.append(
                f"the next smaller fleet fails: {_text(next_one, chosen)} keep"
                f" {self._kept([next_one])}"
            )
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _on(self, each: _Run, chosen: Chosen, fleet: SizedFleet) -> SizedFleet:
        """The fleet's result in a run, simulated unless it was tried there."""
        for tried_kinds, tried in each.tried:
            if tried_kinds == chosen and tried.counts == fleet.counts:
                return tried
        kinds = [kind.kind for kind in chosen]
        return simulate_fleet(each.workload, kinds, fleet.counts, self._promises, self._options)

    def _kept(self, results: list[SizedFleet]) -> str:
        """The range of the kept share of each promise over results."""
        parts = []
        for place, promise in enumerate(self._promises):
            low = min(result.shares[place] for result in results)
            high = max(result.shares[place] for result in results)
            text = f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
            parts.append(f"{promise} for {text}")
        return ", ".join(parts)


def _text(fleet: SizedFleet, chosen: Chosen) -> str:
    """Workers of each kind, with their tiers."""
    return ", ".join(
        f"{count} {each.text}" for count, each in zip(fleet.counts, chosen, strict=True) if count
    )
