"""A table of the ways to bring weights to many workers."""

from collections.abc import Iterable

from kvmesh.simulator.weights.fanout import FanoutResult
from kvmesh.simulator.weights.options import FanoutOptions
from kvmesh.simulator.weights.topologies import TOPOLOGIES, least_time
from kvmesh.terminal.tables import FittedTable, columns

Runs = Iterable[tuple[FanoutOptions, dict[str, FanoutResult]]]


def compare(options: FanoutOptions) -> dict[str, FanoutResult]:
    """Each topology's result; only the stream meets the faults."""
    return {name: topology(options) for name, topology in TOPOLOGIES.items()}


def fanout_table(runs: Runs) -> FittedTable:
    """A row per number of targets and topology; times also in times of one transfer."""
    figures = ("last, s", "median, s", "last, transfers", "copies from seeds", "twice, wrong")
    hide = ("twice, wrong", "median, s", "copies from seeds")
    headings = ("targets", "topology", *figures)
    table = FittedTable(columns(*headings, numbers=("targets", *figures), hide=hide))
    for options, results in runs:
        for name, result in results.items():
            table.add_row(f"{options.targets:,}", name, *_cells(options, result))
        least = least_time(options)
        cells = (f"{least:,.2f}", "", f"{least / options.transfer_s:,.2f}", "1.00", "")
        table.add_row(f"{options.targets:,}", "least possible, at once", *cells)
    return table


def _cells(options: FanoutOptions, result: FanoutResult) -> tuple[str, ...]:
    unfinished = f", {result.unfinished} unfinished" if result.unfinished else ""
    return (
        f"{result.last:,.2f}{unfinished}",
        f"{result.median:,.2f}",
        f"{result.last / options.transfer_s:,.2f}",
        f"{result.seed_copies:,.2f}",
        f"{result.duplicates:,}, {result.wrong:,}",
    )
