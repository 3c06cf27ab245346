"""An analysis as tables and small plots in a terminal."""

from collections.abc import Iterator

import msgspec
from rich.console import Console

from kvmesh.terminal.tables import FittedTable, columns
from kvmesh.workload.analysis.analysis import Analysis
from kvmesh.workload.replay.summary import POINTS, Spread

BARS = " ▁▂▃▄▅▆▇█"


def show(analysis: Analysis, console: Console) -> None:
    """Print the structure of a workload."""
    for line in _facts(analysis):
        console.print(line, highlight=False, soft_wrap=True)
    _distributions(analysis).show(console)
    _visits(analysis).show(console)
    for line in _plots(analysis):
        console.print(line, highlight=False, soft_wrap=True)


def _facts(a: Analysis) -> Iterator[str]:
    children = f" ({a.child_sessions:,} of them child sessions)" if a.child_sessions else ""
    yield f"requests        {a.requests:,} in {a.sessions:,} sessions{children}"
    yield f"arrivals        over {a.span_s:,.1f} s"
    yield f"tokens          {a.input_tokens:,} in, {a.output_tokens:,} out"
    yield f"distinct        {a.unique_tokens:,} prompt tokens, each used {a.reuse:.2f} times"
    yield (
        f"ideal hit rate  {a.ideal_hit_share:.1%} of prompt tokens in an infinite cache "
        f"(blocks of {a.block_size}), {a.read_write:.2f} read per written"
    )
    if a.compactions:
        share = a.compacting_sessions
        yield f"compactions     {a.compactions:,}, in {share:.1%} of sessions"
    if len(a.priorities) > 1:
        counts = ", ".join(f"{count:,} at {level}" for level, count in a.priorities.items())
        yield f"priorities      {counts}"


def _distributions(a: Analysis) -> FittedTable:
    figures = ("mean", *POINTS)
    table = FittedTable(columns("", *figures, numbers=figures), "distributions", split=True)
    rows: dict[str, Spread | None] = {
        "prompt tokens": a.input,
        "new prompt tokens": a.new_tokens,
        "output tokens": a.output,
        f"prompt blocks of {a.block_size}": a.depth if a.block_size > 1 else None,
        "rounds per session": a.rounds_per_session if a.requests > a.sessions else None,
        **{f"{kind} wait, s": waits for kind, waits in a.waits.items()},
    }
    for label, values in rows.items():
        if values is not None:
            table.add_row(label, *map(_figure, msgspec.structs.astuple(values)))
    return table


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _visits(a: Analysis) -> FittedTable:
    figures = ("distinct tokens", "all prompt tokens")
    table = FittedTable(columns("prompts per token", *figures, numbers=figures), "sharing")
    floors = list(a.visits)
    for floor, above in zip(floors, [*floors[1:], ""], strict=True):
        label = f"{floor}+" if not above else f"{floor} to {int(above) - 1}"
        distinct, passed = a.visits[floor]
        table.add_row("1" if floor == "1" else label, f"{distinct:.1%}", f"{passed:.1%}")
    return table


def _plots(a: Analysis) -> Iterator[str]:
    counts = [count for _, count in a.input_histogram]
    edges = [edge for edge, _ in a.input_histogram]
    yield f"prompt lengths  {bars(counts)}  up to {edges[-1]:,.0f} tokens, logarithmic"
    yield f"ideal hit rate  {bars(a.hits_over_time, 1.0)}  over the workload, 0 to 100 %"
    if a.wait_counts:
        yield "waits before    " + ", ".join(f"{k} {v:,}" for k, v in a.wait_counts.items())


def bars(values: list[int] | list[float], top: float | None = None) -> str:
    """One block character per value, scaled to `top` (default: the largest value)."""
    top = top or max([*values, 0]) or 1.0
    steps = len(BARS) - 1
    return "".join(BARS[min(steps, -int(-value * steps // top))] for value in values)
