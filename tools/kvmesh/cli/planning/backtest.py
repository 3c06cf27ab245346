"""`kvmesh plan backtest`: scores all predictors on captured traffic or on a workload."""

import argparse

import msgspec
from msgspec import Struct
from rich.console import Console

from kvmesh.bus.client import Bus
from kvmesh.cli.arguments import add_since, failed, result_file, seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.planning.timeline import ServiceTime, from_captured, from_workload, series
from kvmesh.cli.traces.options import SOURCES, add_trace_options, load_trace, title_of
from kvmesh.planner.prediction.interface import PredictorError
from kvmesh.planner.prediction.registry import predictor_names
from kvmesh.planner.prediction.scoring import Backtest, PredictorScore, backtest
from kvmesh.settings import Settings
from kvmesh.terminal.console import print_line, stdout_console
from kvmesh.terminal.tables import FittedTable, columns
from kvmesh.workload.capture import CapturedRound, capture
from kvmesh.workload.errors import WorkloadError

HELP = "score the predictors of arrivals on past traffic or on a workload"


class BacktestReport(Struct, frozen=True, kw_only=True):
    """The figures of `--json`."""

    source: str
    requests: int
    arrivals: Backtest


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="*",
        metavar="WORKLOAD",
        help=f"{SOURCES}, instead of live traffic",
    )
    add_since(parser, "start of the capture: 90s, 5m, 2h, 1d ago or a time (%(default)s)", "1h")
    parser.add_argument("--model", metavar="NAME", help="only captured requests of this model")
    parser.add_argument(
        "--interval",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds between predictions (%(default)g)",
    )
    parser.add_argument(
        "--startup",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds that a worker takes to start: the horizon that matters (%(default)g)",
    )
    parser.add_argument(
        "--predictors",
        metavar="NAMES",
        help=f"separated by commas, of {', '.join(predictor_names())} (all)",
    )
    parser.add_argument(
        "--ttft",
        type=seconds,
        default=1.0,
        metavar="S",
        help="WORKLOAD: assumed time to first token (%(default)g)",
    )
    parser.add_argument(
        "--itl",
        type=seconds,
        default=0.02,
        metavar="S",
        help="WORKLOAD: assumed time between tokens (%(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="WORKLOAD: random seed")
    parser.add_argument(
        "--json", type=result_file, metavar="FILE", help="write the figures as JSON"
    )
    add_trace_options(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.workload:
        return _on_workload(arguments)
    captured: list[CapturedRound] = []

    async def read(bus: Bus) -> int:
        recorder = await capture(bus, arguments.since, arguments.model)
        captured.extend(recorder.rounds)
        return 0

    try:
        status = run_on_bus("plan", settings, read)
    except WorkloadError as error:
        return _failed(error)
    if status == 0 and not captured:
        return _failed(WorkloadError("no finished requests in this window"))
    return status or _report(arguments, "captured traffic", from_captured(captured))


def _on_workload(arguments: argparse.Namespace) -> int:
    try:
        workload, _ = load_trace(arguments, arguments.workload, arguments.seed)
    except (WorkloadError, OSError) as error:
        return _failed(error)
    service = ServiceTime(arguments.ttft, arguments.itl)
    return _report(arguments, title_of(arguments.workload), from_workload(workload, service))


def _report(arguments: argparse.Namespace, source: str, times: list[float]) -> int:
    names = arguments.predictors.split(",") if arguments.predictors else None
    try:
        report = BacktestReport(
            source=source,
            requests=len(times),
            arrivals=backtest(
                series(times, arguments.interval), arguments.interval, arguments.startup, names
            ),
        )
    except (PredictorError, ValueError) as error:
        return _failed(error)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(report, stdout_console())
    return 0


def _failed(error: Exception) -> int:
    return failed("plan", error, 2)


def show(report: BacktestReport, console: Console) -> None:
    """Print the scores of the predictors."""
    arrivals = report.arrivals
    print_line(
        console,
        f"{report.source}: {report.requests:,} requests, {arrivals.values:,} intervals of "
        f"{arrivals.interval_s:g} s with {arrivals.mean:.3g} in the mean and at most "
        f"{arrivals.largest:,.0f}",
    )
    _table(arrivals).show(console)


def _table(arrivals: Backtest) -> FittedTable:
    figures = ("ahead", "MAE", "MAPE", "pinball 0.5", "pinball 0.9", "below 0.9")
    hide = ("MAPE", "pinball 0.5", "below 0.9")
    wanted = columns("predictor", *figures, numbers=figures, hide=hide)
    table = FittedTable(wanted, title="requests per interval")
    for each in arrivals.predictors:
        _add_rows(table, each, arrivals)
    return table


def _add_rows(table: FittedTable, score: PredictorScore, arrivals: Backtest) -> None:
    name = f"{score.name} *" if score.name == arrivals.best else score.name
    for index, each in enumerate(score.horizons):
        table.add_row(
            "" if index else name,
            f"{each.steps * arrivals.interval_s:g} s",
            f"{each.mae:.3g}",
            "" if each.mape is None else f"{each.mape:.0%}",
            f"{each.pinball50:.3g}",
            f"{each.pinball90:.3g}",
            f"{each.coverage90:.1%}",
        )
