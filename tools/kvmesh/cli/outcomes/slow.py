"""The slowest requests of a window, and where their time went."""

import heapq
from collections.abc import Callable
from datetime import datetime
from itertools import count

from msgspec import Struct
from rich.table import Table

from kvmesh.bus.messages import Outcome
from kvmesh.cli.units import literal
from kvmesh.frontend.namespaces import own_name


class SlowRequest(Struct, frozen=True, kw_only=True):
    """One request's first choice: the parts of its time, in seconds, which add up to `total_s`.

    `prepare_s` in the frontend before the first query of a router; `queue_s` in routers' queues,
    `index_s` for the index, `route_s` in the rest of those queries; `engine_wait_s` in the engine's
    queue, None if the engine does not report it, then `prefill_s` includes it; `prefill_s` up to
    the first token, transfers of KV and lost attempts included; `decode_s` from there.
    """

    request: str
    time: float
    total_s: float
    ttft_s: float | None
    prepare_s: float
    queue_s: float
    index_s: float
    route_s: float
    engine_wait_s: float | None
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    finish: str
    instance: str
    session: str


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

    def slowest(self) -> list[SlowRequest]:
        """The slowest first."""
        return [split(outcome) for _, _, outcome in sorted(self._heap, reverse=True)]


def split(outcome: Outcome) -> SlowRequest:
    """The parts of a request's time.

    After a migration, queries of routers that follow the first token count where they belong, and
    not in the decode time as well.
    """
    first = outcome.total_s if outcome.ttft_s is None else outcome.ttft_s
    before = outcome.prepare_s + outcome.route_s
    wait = min(outcome.engine_wait_s or 0.0, max(first - before, 0.0))
    prefill = max(first - before - wait, 0.0)
    return SlowRequest(
        request=outcome.request,
        time=outcome.time,
        total_s=outcome.total_s,
        ttft_s=outcome.ttft_s,
        prepare_s=outcome.prepare_s,
        queue_s=outcome.wait_s,
        index_s=outcome.index_s,
        route_s=outcome.route_s - outcome.wait_s - outcome.index_s,
        engine_wait_s=None if outcome.engine_wait_s is None else wait,
        prefill_s=prefill,
        decode_s=max(outcome.total_s - before - wait - prefill, 0.0),
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        attempts=outcome.attempts,
        finish=outcome.finish,
        instance=outcome.instance,
        session=own_name(outcome.session),
    )


def render(requests: list[SlowRequest]) -> Table:
    """A row for each request; the parts of its time in order, the largest of them emphasised."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("request", "ended"):
        table.add_column(heading, no_wrap=True)
    for heading in ("total", "prepare", "queue", "index", "route", "engine queue"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("prefill", "decode", "prompt", "cached", "output"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("finish", "worker", "session"):
        table.add_column(heading, no_wrap=True)
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


def _part(seconds: float | None, most: float) -> str:
    if seconds is None:
        return "–"
    text = _duration(seconds)
    return f"[bold]{text}[/bold]" if seconds == most else text


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
