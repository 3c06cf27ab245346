"""The slowest requests of a window, and where their time went."""

import heapq
from collections.abc import Callable
from datetime import datetime
from itertools import count

from rich.text import Text

from kvmesh.bus.messages import Outcome
from kvmesh.cli.units import literal
from kvmesh.observer.request_time import RequestTime, split_time
from kvmesh.terminal.tables import FittedTable, columns

ORDERS: dict[str, Callable[[Outcome], float]] = {
    "total": lambda outcome: outcome.total_s,
    "ttft": lambda outcome: outcome.total_s if outcome.ttft_s is None else outcome.ttft_s,
}


class SlowestRequests:
    """The `limit` slowest of all outcomes added, by total time or by time to the first token."""

    def __init__(self, limit: int, order: str = "total") -> None:
        self._limit = limit
        self._order = ORDERS[order]
        self._heap: list[tuple[float, int, Outcome]] = []
        self._numbers = count()
        self.added = 0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome; further choices of a request end with it and do not count."""
        if outcome.choice:
            return
        self.added += 1
        entry = (self._order(outcome), next(self._numbers), outcome)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def slowest(self) -> list[RequestTime]:
        """The slowest first."""
        return [split_time(outcome) for _, _, outcome in sorted(self._heap, reverse=True)]


def render(requests: list[RequestTime]) -> FittedTable:
    """A row for each request; the parts of its time in order, the largest of them emphasised."""
    headings = ("prepare", "queue", "index", "route", "engine queue", "prefill", "decode")
    figures = ("total", *headings, "prompt", "cached", "output")
    least = (
        "finish",
        "ended",
        "output",
        "session",
        "index",
        "prepare",
        "route",
        "cached",
        "worker",
    )
    table = FittedTable(
        columns(
            *("request", "ended", *figures, "finish", "worker", "session"),
            numbers=figures,
            hide=(*least, "prompt", "queue", "engine queue", "decode", "prefill"),
        )
    )
    for request in requests:
        parts = [
            request.prepare_s,
            request.queue_s,
            request.index_s,
            request.route_s,
            request.engine_wait_s,
            request.prefill_s,
            request.decode_s,
        ]
        most = max(part for part in parts if part is not None)
        again = f" ({request.attempts} attempts)" if request.attempts > 1 else ""
        table.add_row(
            request.request,
            f"{datetime.fromtimestamp(request.time).astimezone():%H:%M:%S}",
            _duration(request.total_s),
            *(_part(part, most) for part in parts),
            f"{request.prompt_tokens:,}",
            f"{request.cached_tokens:,}",
            f"{request.output_tokens:,}",
            request.finish,
            request.instance + again,
            literal(request.session),
        )
    return table


def _part(seconds: float | None, most: float) -> Text:
    if seconds is None:
        return Text("–")
    return Text(_duration(seconds), "bold" if seconds == most else "")


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
