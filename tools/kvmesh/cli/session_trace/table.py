"""A session's turns as a table."""

from collections.abc import Iterable

from rich.table import Table

from kvmesh.cli.session_trace.turns import SessionTurn
from kvmesh.cli.units import literal

TURN_COLUMNS = ("queue", "first token", "total", "prompt", "cached", "output")


def turn_table(turns: Iterable[SessionTurn]) -> Table:
    """One row per turn, by arrival; times from the start of the first one."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("session")
    table.add_column("turn", justify="right")
    for heading in ("at", "waited for", *TURN_COLUMNS):
        table.add_column(heading, justify="right")
    for heading in ("worker", "finish", "request"):
        table.add_column(heading)
    origin: float | None = None
    for turn in turns:
        origin = turn.start if origin is None else origin
        outcome, tokens = turn.round.outcome, turn.decision.tokens
        pause = "" if turn.after is None else f"{turn.waits_for} {turn.start - turn.after:.2f} s"
        first = "" if turn.first_token is None else _ms(turn.first_token - turn.start)
        worker = turn.worker
        if turn.prefill_worker != worker:
            worker = f"{turn.prefill_worker} → {worker}"
        table.add_row(
            *(literal(turn.session), str(turn.number), f"{turn.start - origin:.2f} s", pause),
            *(_ms(turn.placed - turn.routed), first, _ms(turn.end - turn.start)),
            *(f"{tokens:,}", f"{outcome.cached_tokens / max(tokens, 1):.0%}"),
            *(f"{outcome.output_tokens:,}", worker, outcome.finish, turn.request),
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
