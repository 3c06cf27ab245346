"""Finds a request's routing decisions and outcomes, and renders them as text."""

from collections.abc import Iterable, Iterator
from datetime import datetime

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Decision, MessageDecoder, Outcome, RouteEvent
from kvmesh.cli.units import literal_lines
from kvmesh.observer.cache_text import account_lines
from kvmesh.observer.decision_text import (
    ahead_line,
    clock_text,
    compared,
    decision_lines,
    is_same,
    outcome_lines,
    overlap_tiers,
    time_text,
)
from kvmesh.observer.origins import Origins, last_shared
from kvmesh.observer.prefetch_uses import PrefetchUse, PrefetchUses, base_id, prompt_rank
from kvmesh.observer.route_stream import each_message
from kvmesh.terminal.tables import FittedTable, columns

PREFETCH_ID = b"pf_"
MAX_NAMED = 20  # requests of one id of the client
_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)


def own_id(request: str) -> str:
    """The id of a request or of a prefetch, which the API extends by the worker's instance."""
    prefetch, _, _ = request.partition(".")
    return prefetch if prefetch.encode().startswith(PREFETCH_ID) else request


async def find_events(
    bus: Bus,
    request: str,
    since: datetime | None,
    uses: PrefetchUses | None = None,
    follow: bool = True,
) -> list[RouteEvent]:
    """All decisions and outcomes of a request or a prefetch in the route stream, in order.

    Further attempts of a request have the ids REQUEST.1, REQUEST.2, …; they are included. `request`
    may be the client's own id of one or more requests, unless `follow` is false. `uses` follows the
    prefetches in the stream. Raises TimeoutError as `each_message` does.
    """
    found: list[RouteEvent] = []
    named: dict[str, None] = {}  # by the client's own id
    if uses is None:
        uses = PrefetchUses()
    wanted = request.encode()

    def on_message(data: bytes) -> None:
        if wanted not in data and not uses and PREFETCH_ID not in data:
            return
        try:
            event = _routes.decode(data)
        except msgspec.MsgspecError:
            return  # of another version
        uses.add(event)
        if request in (event.request, base_id(event.request)):
            found.append(event)
        elif isinstance(event, Outcome) and event.client == request:
            named[base_id(event.request)] = None

    await each_message(bus, since, on_message)
    if found or not follow:
        return found  # a client may name its requests like those of others
    for own in list(named)[:MAX_NAMED]:
        found += await find_events(bus, own, since, follow=False)
    return found


def show(
    events: Iterable[RouteEvent],
    console: Console,
    uses: PrefetchUses | None = None,
    origins: Origins | None = None,
) -> None:
    """Print each decision with its candidates, and each outcome; then the prefetches concerned."""
    decisions: dict[str, Decision] = {}
    for event in events:
        if isinstance(event, Decision):
            decisions[event.request] = event
            console.print(render_decision(event), crop=False)
        else:
            decision = decisions.get(event.request)
            console.print(render_outcome(event, decision, origins or Origins((), ())))
    for request in dict.fromkeys(base_id(name) for name in decisions):
        for lines in prefetch_lines(request, uses or PrefetchUses()):
            console.print(literal_lines(lines), Text(), sep="\n")


def render_decision(decision: Decision) -> RenderableType:
    """The placement, its time and waits, and the cost of each candidate."""
    first, *lines = decision_lines(decision)
    indented = [first, *(f"  {line}" for line in lines)]
    return Group(literal_lines(indented), Text(), _table(decision), Text())


def render_outcome(outcome: Outcome, decision: Decision | None, origins: Origins) -> RenderableType:
    """The measured outcome, with the overlap that the decision expected, and its account."""
    first, *lines = outcome_lines(outcome, decision)
    if outcome.cache is not None:
        account = outcome.cache
        block = last_shared(account, decision)
        shared = origins.first(block) if block is not None else None
        lines += account_lines(account, outcome.cached_tiers, origins.name, shared)
    if outcome.ahead is not None:
        lines.append(ahead_line(outcome.ahead))
    return Group(literal_lines([first, *(f"  {line}" for line in lines)]), Text())


def _table(decision: Decision) -> FittedTable:
    tiers = overlap_tiers(decision)
    figures = (*tiers, "prefilling", "decoding", "requests", "cost")
    hide = ("requests", "decoding", "prefilling", *reversed(tiers))
    table = FittedTable(columns("worker", "rank", *figures, numbers=figures, hide=hide))
    shown = compared(decision)
    for candidate in shown:
        table.add_row(
            f"{'▸' if is_same(candidate, decision.chosen) else ' '} {candidate.worker}",
            str(candidate.rank),
            *(str(candidate.overlap[tier]) for tier in tiers.values()),
            f"{candidate.prefill:.1f}",
            f"{candidate.decode:.1f}",
            str(candidate.requests),
            f"{candidate.cost:.2f}",
        )
    more = decision.eligible - len(shown)
    if more > 0:
        table.add_row(f"  and {more} more")
    return table


def prefetch_lines(request: str, uses: PrefetchUses) -> Iterator[list[str]]:
    """Lines on each prefetch that a request ended, or on the prefetch with this id."""
    own = uses.of_prefetch(request)
    for use in [own] if own is not None else uses.of_request(request):
        placed, rank = use.prefetch, use.rank
        lines = [
            f"{placed.request} at {clock_text(placed.time)} on {rank.worker} rank {rank.rank}"
            f" ({rank.instance}): {_aim(use)}"
        ]
        if use.request is None:
            lines.append("  no request with its prompt or of its session has come since")
        else:
            after = use.request.time - placed.time
            lines.append(f"  {use.request.request} came {time_text(after)} later{_use(use)}")
        yield lines


def _aim(use: PrefetchUse) -> str:
    load, compute, first = use.tokens_to_load, use.tokens_to_compute, use.first_token
    if not load + compute:
        return "nothing was to be loaded or computed"
    parts = [f"{load:,} to be loaded"] * bool(load) + [f"{compute:,} to be computed"] * bool(
        compute
    )
    total = load + compute
    return f"{total:,} tokens ({first:,} to {first + total:,}), {' and '.join(parts)}"


def _use(use: PrefetchUse) -> str:
    used = f": {use.used_tokens:,} of them used" if use.used_tokens else ": none used"
    if use.request is not None and use.elsewhere:
        return f"{used}, as it was placed on {prompt_rank(use.request).worker}"
    if use.differs:
        same = use.shared_blocks * use.prefetch.block_size
        return f"{used}, as its prompt differs after {same:,} tokens"
    if use.outcome is None:
        return " and has not ended"
    return used if use.tokens_to_load + use.tokens_to_compute else ""
