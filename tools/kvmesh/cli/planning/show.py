"""`kvmesh plan`: shows the planner's present plan, or its history."""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import PoolPlan, ScalingDecision
from kvmesh.cli.arguments import add_since, failed, result_file
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.planning.history import LATEST_MINUTES, read_decisions
from kvmesh.cli.planning.page import plan_page
from kvmesh.observer.hindsight import Hindsight, hindsight
from kvmesh.observer.plans import by_model
from kvmesh.settings import Settings
from kvmesh.terminal.console import print_line, stdout_console
from kvmesh.terminal.tables import FittedTable, columns

MOST_CANDIDATES = 6
WORTH_PARKING_S = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    add_since(
        parser,
        "the decisions since then: 90s, 5m, 2h, 1d ago or a time; otherwise the present plan",
    )
    parser.add_argument("--model", metavar="NAME", help="only this model's")
    parser.add_argument(
        "--json", type=result_file, metavar="FILE", help="write the decisions as JSON"
    )
    parser.add_argument(
        "--html", type=result_file, metavar="FILE", help="write a report with plots"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    decisions: list[ScalingDecision] = []

    async def read(bus: Bus) -> int:
        decisions.extend(await read_decisions(bus, arguments.since, arguments.model))
        return 0

    status = run_on_bus("plan", settings, read)
    if status:
        return status
    if not decisions:
        about = f" about {arguments.model}" if arguments.model else ""
        when = "in this time" if arguments.since else f"in the last {LATEST_MINUTES} minutes"
        return failed("plan", f"no planner has decided anything{about} {when}")
    makers: list[tuple[Path | None, Callable[[], bytes]]] = [
        (arguments.json, lambda: msgspec.json.encode(decisions)),
        (arguments.html, lambda: plan_page(decisions).encode()),
    ]
    for file, data in makers:
        if file is not None and not _write(file, data):
            return 2
    console = stdout_console()
    if arguments.since is None:
        for decision in decisions:
            _show_present(decision, console)
    else:
        _show_history(decisions, console)
    return 0


def _write(file: Path, make: Callable[[], bytes]) -> bool:
    try:
        file.write_bytes(make())
    except OSError as error:
        print(f"kvmesh plan: cannot write {file}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _show_present(decision: ScalingDecision, console: Console) -> None:
    age = max(time.time() - decision.time, 0.0)
    signals = defaultdict(float, decision.signals)
    print_line(
        console,
        f"{decision.model}: {decision.reason} ({age:.0f} s ago, by {decision.planner} through"
        f" {decision.connector})",
    )
    counts = ("ready", "starting", "wanted", "waiting", "start-up s", "never ready")
    measured = ("step times", "samples")
    hide = ("samples", "never ready", "start-up s", "step times", "waiting")
    pools = FittedTable(columns("pool", *counts, *measured, numbers=counts, hide=hide))
    for name, pool in decision.pools.items():
        pools.add_row(
            name, str(pool.ready), str(pool.starting), str(pool.wanted),
            _waiting(pool), f"{pool.startup_s:.0f}", str(pool.failed), _step_times(pool),
            str(pool.samples),
        )  # fmt: skip
    pools.show(console)
    for name, pool in decision.pools.items():
        if advice := _parking_advice(name, pool):
            print_line(console, advice)
    for switch in decision.switches:
        console.print(
            f"{switch.instance} changes its role: from pool {switch.source} to {switch.target}",
            markup=False, highlight=False,
        )  # fmt: skip
    print_line(
        console,
        f"arrivals {signals['arrivals_per_s']:.2f}/s, forecast {signals['forecast_per_s']:.2f}/s;"
        f" waiting {signals['waiting_requests']:.0f} requests,"
        f" {signals['waiting_tokens']:,.0f} tokens; mean prompt {signals['prompt_tokens']:,.0f}"
        f" tokens, {signals['uncached_tokens']:,.0f} of them to compute; mean output"
        f" {signals['output_tokens']:,.0f}",
    )
    for promise, share in decision.kept.items():
        note = ", which no worker can keep" if promise in decision.unreachable else ""
        console.print(
            f"{promise}: {share:.1%} of the last minutes' requests kept it{note}",
            markup=False, highlight=False,
        )  # fmt: skip
    if decision.candidates:
        _candidates(decision).show(console)


def _waiting(pool: PoolPlan) -> str:
    """Workers that can be promoted, and how many of the pool's sleep rather than stop."""
    return f"{pool.parked} ({pool.asleep} asleep)" if pool.asleep else str(pool.parked)


def _parking_advice(name: str, pool: PoolPlan) -> str:
    """Advice to park more workers; empty if starts are short or enough may wait."""
    if pool.rise <= pool.may_wait or pool.startup_s < WORTH_PARKING_S:
        return ""
    known = f", {pool.promotion_s:.0f} s here" if 0 < pool.promotion_s < pool.startup_s else ""
    return (
        f"{name}: {pool.rise} workers were added within one start-up time,"
        f" {pool.startup_s:.0f} s; with parked={pool.rise} they would serve after a"
        f" promotion{known}"
    )


def _step_times(pool: PoolPlan) -> str:
    """The source of a pool's step times; of a profile also the measured time over its own."""
    factor = f" ×{pool.profile_factor:.2f}" if pool.profile_factor != 1 else ""
    return pool.step_times + factor


def _candidates(decision: ScalingDecision) -> FittedTable:
    names = list(decision.candidates[0].shares)
    figures = ("cost/h", "busy", *names)
    table = FittedTable(
        columns("workers", *figures, numbers=figures),
        title="fleets considered, with what they would keep",
        split=True,
    )
    for each in decision.candidates[:MOST_CANDIDATES]:
        table.add_row(
            ", ".join(f"{pool} {n}" for pool, n in each.workers.items()),
            f"{each.cost:g}",
            f"{each.busy:.0%}",
            *(f"{each.shares[name]:.1%} ({each.quantiles[name]:.2g} s)" for name in names),
        )
    return table


def _show_history(decisions: list[ScalingDecision], console: Console) -> None:
    models = by_model(decisions)
    known: list[tuple[ScalingDecision, Hindsight]] = []
    for own in models.values():
        known += zip(own, hindsight(own), strict=True)
    known.sort(key=lambda each: each[0].time)
    for decision, came in known:
        if not decision.changed and decision is not decisions[-1]:
            continue
        signals = defaultdict(float, decision.signals)
        kept = ", ".join(f"{share:.0%} {name}" for name, share in decision.kept.items())
        sizes = ", ".join(f"{name} {p.before}→{p.wanted}" for name, p in decision.pools.items())
        console.print(
            time.strftime("%H:%M:%S", time.localtime(decision.time)),
            *([decision.model] if len(models) > 1 else []),
            f" {sizes}  arrivals {signals['arrivals_per_s']:.2f}/s, forecast"
            f" {signals['forecast_per_s']:.2f}/s, waiting {signals['waiting_requests']:.0f};"
            f" kept {kept or 'unknown'}; {decision.reason}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        if decision.changed:
            print_line(console, f"          came true: {came.text(signals['forecast_per_s'])}")
