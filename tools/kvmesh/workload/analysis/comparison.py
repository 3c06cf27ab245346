"""The structure of two workloads side by side."""

from collections.abc import Iterator
from itertools import pairwise
from math import isfinite

from msgspec import Struct
from rich.console import Console

from kvmesh.terminal.tables import FittedTable, columns
from kvmesh.workload.analysis.analysis import Analysis, analyze
from kvmesh.workload.analysis.memory import held_shares, touched_block_size
from kvmesh.workload.generate.families import (
    branch_uses,
    families_of,
    family_start,
    shared_ends,
)
from kvmesh.workload.model import Workload
from kvmesh.workload.replay.summary import Spread, spread

# Parts of the first workload's distinct tokens that the LRU caches of the comparison hold.
CACHES = (2, 4, 8, 16)
POINTS = ("mean", "p50", "p90")
NONE = Spread(*[0.0] * 6)


class WorkloadFigure(Struct, frozen=True):
    """One figure of two workloads: tokens, seconds, or a share from 0 to 1."""

    name: str
    first: float
    second: float
    share: bool = False

    @property
    def difference(self) -> float:
        """The second value relative to the first, less 1; infinite if only the first is 0."""
        if self.first == self.second:
            return 0.0
        return self.second / self.first - 1 if self.first else float("inf")


def compare(
    first: Workload, second: Workload, block_size: int | None = None
) -> list[WorkloadFigure]:
    """The figures of two workloads; hits are in blocks of `block_size` (the coarser one's)."""
    size = block_size or max(first.block_size, second.block_size)
    one, other = analyze(first, size), analyze(second, size)
    caches = [one.unique_tokens // part for part in CACHES]
    blocks = max(map(touched_block_size, (first, second)))
    held = [held_shares(workload, caches, blocks) for workload in (first, second)]
    figures = [
        WorkloadFigure("requests", one.requests, other.requests),
        WorkloadFigure("sessions", one.sessions, other.sessions),
        *_shares("ideal share", one.ideal_hit_share, other.ideal_hit_share),
    ]
    for part, capacity, before, after in zip(CACHES, caches, *held, strict=True):
        figures += _shares(f"share in an LRU of {capacity:,} tokens (1/{part})", before, after)
    figures += _shares("tokens shared by sessions", *map(_shared_share, (first, second)))
    figures += _shares("prompts that rewrite", *map(_rewritten_share, (first, second)))
    figures += _shares("child sessions", *map(_child_share, (one, other)))
    before, after = _spreads(one, first), _spreads(other, second)
    for name in [*before, *(name for name in after if name not in before)]:
        figures += _points(name, before.get(name, NONE), after.get(name, NONE))
    return figures


def _shares(name: str, first: float, second: float) -> Iterator[WorkloadFigure]:
    """The figure, unless it is 0 in both."""
    if first or second:
        yield WorkloadFigure(name, first, second, share=True)


def _points(name: str, first: Spread, second: Spread) -> Iterator[WorkloadFigure]:
    for point in POINTS:
        before, after = getattr(first, point), getattr(second, point)
        if before or after:
            yield WorkloadFigure(f"{name}, {point}", before, after)


def _spreads(analysis: Analysis, workload: Workload) -> dict[str, Spread]:
    found = {
        "prompt tokens": analysis.input,
        "new prompt tokens": analysis.new_tokens,
        "output tokens": analysis.output,
        "requests per session": analysis.rounds_per_session,
        "s between arrivals": spread(_arrival_gaps(workload)),
        "s between open turns": spread(_turn_gaps(workload)),
        **{f"s of {kind} wait": waits for kind, waits in analysis.waits.items()},
    }
    return {name: values for name, values in found.items() if values is not None}


def _arrival_gaps(workload: Workload) -> Iterator[float]:
    """Seconds between the starts of families of sessions."""
    starts = sorted(family_start(workload, family) for family in families_of(workload))
    return (later - sooner for sooner, later in pairwise(starts))


def _turn_gaps(workload: Workload) -> Iterator[float]:
    """Seconds between the requests of a session that wait for none."""
    for members in workload.by_session():
        rounds = [workload.rounds[index] for index in members]
        for sooner, later in pairwise(round_ for round_ in rounds if not round_.after):
            yield later.at_s - sooner.at_s


def _shared_share(workload: Workload) -> float:
    """Share of prompt tokens in prefixes of at least two families of sessions."""
    ends = shared_ends(branch_uses(workload, families_of(workload)))
    shared = total = 0
    for round_ in workload.rounds:
        total += round_.input_tokens
        for branch, start, end in workload.tree.reversed_path(round_.branch, round_.input_tokens):
            if ends.get(branch, 0) > start:
                shared += min(ends[branch], end)
                break
    return shared / total if total else 0.0


def _rewritten_share(workload: Workload) -> float:
    """Share of prompts that do not continue their session's prompt before."""
    size = workload.block_size
    rewritten = 0
    for members in workload.by_session():
        for sooner, later in pairwise(workload.rounds[index] for index in members):
            kept = sooner.input_tokens // size * size
            rewritten += workload.tree.shared(sooner.branch, later.branch, kept) < kept
    return rewritten / len(workload) if len(workload) else 0.0


def _child_share(analysis: Analysis) -> float:
    return analysis.child_sessions / max(1, analysis.sessions)


def show_comparison(
    figures: list[WorkloadFigure], names: tuple[str, str], console: Console
) -> None:
    """Print the figures and their relative differences."""
    numbers = (*names, "difference")
    table = FittedTable(columns("", *numbers, numbers=numbers), "comparison")
    for each in figures:
        cells = (_figure(each, value) for value in (each.first, each.second))
        difference = f"{each.difference:+.1%}" if isfinite(each.difference) else "–"
        table.add_row(each.name, *cells, difference)
    table.show(console)


def _figure(figure: WorkloadFigure, value: float) -> str:
    if figure.share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
