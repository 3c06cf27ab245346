"""A session's turns as a table."""

from collections.abc import Iterable

from kvmesh.cli.session_trace.turns import SessionTurn
from kvmesh.cli.units import literal
from kvmesh.terminal.tables import FittedTable, columns

TURN_COLUMNS = ("queue", "first token", "total", "prompt", "cached", "output")


def turn_table(turns: Iterable[SessionTurn]) -> FittedTable:
    """One row per turn, by arrival; times from the start of the first one."""
    figures = ("turn", "at", "waited for", *TURN_COLUMNS)
    hide = ("finish", "output", "queue", "prompt", "worker", "waited for", "at", "total", "cached")
    table = FittedTable(
        columns(
            *("session", *figures, "worker", "finish", "request"),
            numbers=figures,
            hide=(*hide, "first token"),
        )
    )
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
