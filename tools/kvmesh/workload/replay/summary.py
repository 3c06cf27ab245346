"""Figures of a replay, and their table."""

import re
from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from kvmesh.terminal.tables import FittedTable, columns
from kvmesh.workload.replay.chat_client import Sample

POINTS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


class Spread(Struct, frozen=True):
    """Mean and percentiles of a distribution, in the unit of its values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and interpolated percentiles; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    points = {name: _percentile(ordered, share) for name, share in POINTS.items()}
    return Spread(mean=sum(ordered) / len(ordered), **points)


def _percentile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class ReplaySummary(Struct, frozen=True, kw_only=True):
    """The figures of a replay; times in seconds, shares from 0 to 1.

    `length_ratio` is prompt tokens counted by the server over those in the trace.
    """

    trace: str
    url: str
    model: str
    speed: float
    concurrency: int
    wall_s: float
    requests: int
    succeeded: int
    failed: int
    aborted: int
    unfinished: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cached_share: float
    length_ratio: float
    ttft_s: Spread | None
    inter_token_s: Spread | None
    total_s: Spread | None
    gap_s: Spread | None
    late_s: Spread | None


def summarize(
    samples: list[Sample],
    wanted_tokens: dict[int, int],
    wall_s: float,
    *,
    trace: str,
    url: str,
    model: str,
    speed: float,
    concurrency: int,
) -> ReplaySummary:
    """The figures of `samples`; `wanted_tokens` maps each round's index to its prompt length."""
    good = [s for s in samples if s.error is None]
    whole = [s for s in good if not s.aborted]
    prompt = sum(s.prompt_tokens for s in whole)
    cached = sum(s.cached_tokens for s in whole)
    wanted = sum(wanted_tokens[s.index] for s in whole)
    return ReplaySummary(
        trace=trace,
        url=url,
        model=model,
        speed=speed,
        concurrency=concurrency,
        wall_s=wall_s,
        requests=len(samples),
        succeeded=len(good),
        failed=len(samples) - len(good),
        aborted=len(good) - len(whole),
        unfinished=len(wanted_tokens) - len(samples),
        errors=dict(Counter(kind(s.error) for s in samples if s.error is not None).most_common()),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=sum(s.output_tokens for s in whole),
        cached_share=cached / prompt if prompt else 0.0,
        length_ratio=prompt / wanted if wanted else 0.0,
        ttft_s=spread(s.ttft_s for s in good if s.ttft_s is not None),
        inter_token_s=spread(s.inter_token_s for s in whole if s.inter_token_s is not None),
        total_s=spread(s.total_s for s in whole),
        gap_s=spread(s.gap_s for s in whole if s.ttft_s is not None),
        late_s=spread(s.late_s for s in samples),
    )


def kind(error: str) -> str:
    """An error message without ids, so that equal errors are counted together."""
    return re.sub(r"\b(?=[\w-]*\d)[\w-]{8,}\b", "…", error)


def show(summary: ReplaySummary, console: Console) -> None:
    """Print the figures as a table, then the errors, if any."""
    figures = ("mean", *POINTS)
    title = f"{summary.trace} → {summary.url} ({summary.model})"
    table = FittedTable(columns("ms", *figures, numbers=figures), title, split=True)
    for label, values in (
        ("TTFT", summary.ttft_s),
        ("inter-token", summary.inter_token_s),
        ("longest gap", summary.gap_s),
        ("total", summary.total_s),
        ("sent late", summary.late_s),
    ):
        if values is not None:
            cells = [f"{value * 1e3:,.1f}" for value in msgspec.structs.astuple(values)]
            table.add_row(label, *cells)
    table.show(console)
    for line in _lines(summary):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(summary: ReplaySummary) -> Iterable[str]:
    rate = summary.requests / summary.wall_s if summary.wall_s else 0.0
    output_rate = summary.output_tokens / summary.wall_s if summary.wall_s else 0.0
    yield (
        f"requests      {summary.requests:,} ({summary.failed:,} failed, {summary.aborted:,} "
        f"aborted by the client) in {summary.wall_s:,.1f} s: {rate:,.1f}/s"
    )
    yield (
        f"tokens        {summary.prompt_tokens:,} in ({summary.length_ratio:.3f} of the trace's), "
        f"{summary.output_tokens:,} out: {output_rate:,.0f}/s"
    )
    yield f"cached tokens {summary.cached_share:.1%} of prompt tokens"
    if summary.unfinished:
        yield f"unfinished    {summary.unfinished:,}"
    for error, count in summary.errors.items():
        yield f"[red]error[/red] {count:>6,}×  {escape(error)}"
