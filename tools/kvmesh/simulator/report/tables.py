"""Figures of runs as a table in a terminal."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console

from kvmesh.simulator.report.figures import Figures, LatencyFigures
from kvmesh.simulator.report.tiers import TierFigures, tier_rows
from kvmesh.terminal.tables import FittedTable, TextColumn
from kvmesh.workload.replay.summary import Spread

Row = tuple[str, Callable[[Figures], str]]


def _ms(pick: Callable[[LatencyFigures], Spread | None], point: str) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        values = pick(figures.latency)
        return "–" if values is None else f"{getattr(values, point) * 1000:,.1f}"

    return cell


def _lost(part: str, figures: Figures) -> str:
    cache = figures.cache
    ideal = cache.cached_tokens + cache.recomputed_tokens
    return f"{getattr(cache.lost, part) / max(ideal, 1):.1%}"


CACHED_SHARE = "cached share"
ROWS: tuple[Row, ...] = (
    ("requests", lambda f: f"{f.rounds:,}"),
    ("failed", lambda f: f"{f.failed:,}"),
    ("requests/s", lambda f: f"{f.requests_per_s:,.2f}"),
    ("output tokens/s", lambda f: f"{f.output_tokens_per_s:,.0f}"),
    ("output tokens/s, middle half", lambda f: f"{f.steady_tokens_per_s:,.0f}"),
    ("TTFT p50, ms", _ms(lambda x: x.ttft_s, "p50")),
    ("TTFT p90, ms", _ms(lambda x: x.ttft_s, "p90")),
    ("TTFT p99, ms", _ms(lambda x: x.ttft_s, "p99")),
    ("TTFT mean, ms", _ms(lambda x: x.ttft_s, "mean")),
    ("inter-token p50, ms", _ms(lambda x: x.inter_token_s, "p50")),
    ("inter-token p99, ms", _ms(lambda x: x.inter_token_s, "p99")),
    ("latency p50, ms", _ms(lambda x: x.total_s, "p50")),
    ("latency mean, ms", _ms(lambda x: x.total_s, "mean")),
    ("latency p99, ms", _ms(lambda x: x.total_s, "p99")),
    ("slowdown p50", lambda f: f"{f.latency.slowdown.p50:,.2f}" if f.latency.slowdown else "–"),
    ("queue wait p99, ms", _ms(lambda x: x.queue_s, "p99")),
    (CACHED_SHARE, lambda f: f"{f.cache.cached_share:.1%}"),
    ("ideal share", lambda f: f"{f.cache.ideal_share:.1%}"),
    ("share of ideal", lambda f: f"{f.cache.share_of_ideal:.1%}"),
    ("read/write", lambda f: f"{f.cache.read_write:.2f}"),
    ("recomputed tokens", lambda f: f"{f.cache.recomputed_tokens:,}"),
    *(
        (f"· {name}, of ideal", partial(_lost, part))
        for name, part in (
            ("placed elsewhere", "elsewhere"),
            ("evicted", "evicted"),
            ("evicted while queued", "dropped"),
            ("unfinished", "unfinished"),
            ("last blocks", "ends"),
        )
    ),
    ("evicted blocks", lambda f: f"{f.cache.evicted_blocks:,}"),
    ("load imbalance", lambda f: f"{f.imbalance:.2f}"),
    ("worker-hours", lambda f: f"{f.fleet.worker_hours:,.2f}"),
    ("workers", lambda f: f"{f.fleet.least}–{f.fleet.most}"),
    ("additions, removals", lambda f: f"{f.fleet.additions}, {f.fleet.removals}"),
)


def rows(runs: Sequence[Figures]) -> list[Row]:
    """The rows of a table of runs; those of lower tiers only if a run has used them."""
    own, tiers = list(ROWS), [_of_tiers(*row) for row in tier_rows([run.tiers for run in runs])]
    by_tier = sum(name.startswith("· from") for name, _ in tiers)
    after = next(n for n, (name, _) in enumerate(own, 1) if name == CACHED_SHARE)
    return [*own[:after], *tiers[:by_tier], *own[after:], *tiers[by_tier:]]


def _of_tiers(name: str, cell: Callable[[TierFigures], str]) -> Row:
    return name, lambda figures: cell(figures.tiers)


def show(runs: Sequence[Figures], console: Console) -> None:
    """Print one column per run, then priorities and errors, if any."""
    policies = [TextColumn(run.policy, number=True) for run in runs]
    table = FittedTable([TextColumn(""), *policies], split=True)
    for name, cell in rows(runs):
        table.add_row(name, *(cell(run) for run in runs))
    table.show(console)
    for run in runs:
        for note in notes(run):
            console.print(note, markup=False, soft_wrap=True)


def notes(run: Figures) -> Iterator[str]:
    """Lines below the table: latency by priority, speculative prefills, errors with counts."""
    for level, latency in run.by_priority.items():
        if latency.ttft_s and latency.total_s:
            yield (
                f"{run.policy}, priority {level}: {latency.requests:,} requests, "
                f"TTFT p50 {latency.ttft_s.p50 * 1000:,.1f} ms, "
                f"latency p50 {latency.total_s.p50 * 1000:,.1f} ms"
            )
    if run.fleet.waiting_hours:
        yield (
            f"{run.policy}: {run.fleet.promotions:,} promotions;"
            f" {run.fleet.waiting_hours:,.2f} hours of workers parked or asleep"
        )
    if run.ahead is not None:
        share = run.ahead.useful_tokens / max(run.ahead.computed_tokens, 1)
        yield (
            f"{run.policy}: {run.ahead.prefills:,} speculative prefills of "
            f"{run.ahead.computed_tokens:,} tokens, {share:.1%} of them used by the next prompt"
        )
    for error, count in run.errors.items():
        yield f"{run.policy}: {count:,}× {error}"
