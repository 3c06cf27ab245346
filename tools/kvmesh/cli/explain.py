"""Finds a request's routing decisions and outcomes, and renders them as text."""

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Candidate, ComputedAhead, Decision, Outcome, RouteEvent
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.hashing import HASH_BYTES

TIMEOUT_S = 10.0
_routes: "msgspec.msgpack.Decoder[RouteEvent]" = msgspec.msgpack.Decoder(RouteEvent)
TIERS = ("engine", "host", "disk", "remote")


async def find_events(bus: Bus, request: str, since: datetime | None) -> list[RouteEvent]:
    """All decisions and outcomes of a request in the route stream, in order.

    Further attempts of a request have the ids REQUEST.1, REQUEST.2, …; they are included.
    Raises TimeoutError if reading to the end of the stream takes more than TIMEOUT_S.
    """
    found: list[RouteEvent] = []
    wanted = request.encode()

    def on_message(message: StreamMessage) -> None:
        if wanted not in message.data:
            return
        event = _routes.decode(message.data)
        if event.request == request or event.request.startswith(f"{request}."):
            found.append(event)

    start = Start() if since is None else Start(time=since)
    subjects = bus.subjects
    reader = StreamReader(bus, subjects.route_stream, subjects.route_all, on_message, start)
    await reader.open()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await reader.caught_up.wait()
    finally:
        await reader.close()
    return found


def show(events: Iterable[RouteEvent], console: Console) -> None:
    """Print each decision with its candidates, and each outcome."""
    decisions: dict[str, Decision] = {}
    for event in events:
        if isinstance(event, Decision):
            decisions[event.request] = event
            console.print(render_decision(event))
        else:
            console.print(render_outcome(event, decisions.get(event.request)))


def render_decision(decision: Decision) -> RenderableType:
    """The placement, its time and waits, and the cost of each candidate."""
    chosen = decision.chosen
    blocks = len(decision.sequence_hashes) // HASH_BYTES
    lines = [
        f"{decision.request}: {decision.tokens:,} tokens of {decision.model}, {blocks} full blocks",
        f"  to {chosen.worker} rank {chosen.rank} ({chosen.instance}) by {decision.policy}"
        f" at {_clock(decision.time)}, decided by {decision.router}",
        f"  waited {_ms(decision.wait_s)} in the queue, {_ms(decision.index_s)} for the index",
    ]
    if decision.attempt:
        lines.append(f"  attempt {decision.attempt + 1}: earlier workers did not accept it")
    if decision.prefill is not None:
        first = decision.prefill
        lines.append(f"  prefill on {first.worker} rank {first.rank} ({first.instance})")
    if decision.note:
        lines.append(f"  note: {decision.note}")
    best = best_rejected(decision)
    if best is not None:
        lines.append(f"  {_margin(chosen, best)}")
    return Group(Text("\n".join(lines)), Text(), _table(decision), Text())


def render_outcome(outcome: Outcome, decision: Decision | None) -> RenderableType:
    """The measured outcome, with the overlap that the decision expected."""
    lines = [
        f"{outcome.request}: {outcome.finish} on {outcome.instance} at {_clock(outcome.time)}",
        f"  {_ttft(outcome.ttft_s)}, all {outcome.output_tokens:,} after {_ms(outcome.total_s)}",
        f"  cached {outcome.cached_tokens:,} prompt tokens{_expected(decision)}",
    ]
    if outcome.ahead is not None:
        lines.append(f"  {_ahead(outcome.ahead)}")
    return Group(Text("\n".join(lines)), Text())


def best_rejected(decision: Decision) -> Candidate | None:
    """The cheapest candidate that was not chosen."""
    chosen = (decision.chosen.instance, decision.chosen.rank)
    others = [c for c in decision.candidates if (c.instance, c.rank) != chosen]
    return min(others, key=lambda c: c.cost, default=None)


def _margin(chosen: Candidate, best: Candidate) -> str:
    difference = best.cost - chosen.cost
    name = f"{best.worker} rank {best.rank}"
    if difference == 0:
        return f"same cost as {name}"
    word = "cheaper" if difference > 0 else "more expensive"
    return f"{abs(difference):.1f} {word} than the best alternative, {name}"


def _table(decision: Decision) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for heading in ("worker", "rank"):
        table.add_column(heading, no_wrap=True)
    tiers = _tiers(decision)
    for heading in (*tiers, "prefilling", "decoding", "requests", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    chosen = decision.chosen
    shown = decision.candidates or [chosen]
    if not any(_same(c, chosen) for c in shown):
        shown = [*shown, chosen]
    for candidate in shown:
        table.add_row(
            "▸" if _same(candidate, chosen) else "",
            candidate.worker,
            str(candidate.rank),
            *(str(candidate.overlap[tier]) for tier in tiers.values()),
            f"{candidate.prefill:.1f}",
            f"{candidate.decode:.1f}",
            str(candidate.requests),
            f"{candidate.cost:.2f}",
        )
    more = decision.eligible - len(shown)
    if more > 0:
        table.add_row("", f"and {more} more")
    return table


def _tiers(decision: Decision) -> dict[str, int]:
    """Headings and indices of the first tier and of those in which a candidate has an overlap."""
    tiers = range(len(decision.chosen.overlap))
    candidates = [decision.chosen, *decision.candidates]
    used = [tier for tier in tiers if tier == 0 or any(c.overlap[tier] for c in candidates)]
    return {f"{TIERS[tier]} blocks": tier for tier in used if tier < len(TIERS)}


def _same(one: Candidate, other: Candidate) -> bool:
    return (one.instance, one.rank) == (other.instance, other.rank)


def _expected(decision: Decision | None) -> str:
    if decision is None or not decision.block_size:
        return ""
    expected = sum(decision.chosen.overlap) * decision.block_size
    return f", expected {expected:,}"


def _ahead(ahead: ComputedAhead) -> str:
    use = f"{ahead.used:,} of them used" if ahead.used else "none used"
    reason = ", as this prompt differs from the predicted one" if ahead.differs else ""
    until = ahead.first + ahead.tokens
    return (
        f"{ahead.tokens:,} tokens ({ahead.first:,} to {until:,}) were to be computed ahead"
        f" after {ahead.after}: {use}{reason}"
    )


def _clock(seconds: float) -> str:
    stamp = datetime.fromtimestamp(seconds, UTC).astimezone()
    day = "" if time.time() - seconds < 86400 else f"{stamp:%Y-%m-%d} "
    return f"{day}{stamp:%H:%M:%S}.{stamp.microsecond // 1000:03d}"


def _ttft(seconds: float | None) -> str:
    return "no token" if seconds is None else f"first token after {_ms(seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
