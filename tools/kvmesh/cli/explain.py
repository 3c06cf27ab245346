"""Finds a request's routing decisions and outcomes, and renders them as text."""

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Candidate,
    ComputedAhead,
    Decision,
    Hints,
    Outcome,
    PrefetchTerms,
    RouteEvent,
)
from kvmesh.cli.units import literal_lines
from kvmesh.frontend.namespaces import own_name
from kvmesh.hashing import HASH_BYTES
from kvmesh.observer.cache_text import account_lines
from kvmesh.observer.origins import Origins, last_shared
from kvmesh.observer.prefetch_uses import PrefetchUse, PrefetchUses, base_id, prompt_rank
from kvmesh.observer.route_stream import each_message

PREFETCH_ID = b"pf_"
MAX_NAMED = 20  # requests of one id of the client
_routes: "msgspec.msgpack.Decoder[RouteEvent]" = msgspec.msgpack.Decoder(RouteEvent)
TIERS = ("engine", "host", "disk", "remote")


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
            console.print(render_decision(event))
        else:
            decision = decisions.get(event.request)
            console.print(render_outcome(event, decision, origins or Origins((), ())))
    for request in dict.fromkeys(base_id(name) for name in decisions):
        for lines in prefetch_lines(request, uses or PrefetchUses()):
            console.print(literal_lines(lines), Text(), sep="\n")


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
    if caller := _caller(decision.hints):
        lines.append(f"  {caller}")
    if decision.attempt:
        lines.append(f"  attempt {decision.attempt + 1}: earlier workers did not accept it")
    if decision.prefill is not None:
        first = decision.prefill
        lines.append(f"  prefill on {first.worker} rank {first.rank} ({first.instance})")
    if decision.note:
        lines.append(f"  note: {decision.note}")
    if decision.prefetch is not None:
        lines.append(f"  {_terms(decision.prefetch)}")
    best = best_rejected(decision)
    if best is not None:
        lines.append(f"  {_margin(chosen, best)}")
    return Group(literal_lines(lines), Text(), _table(decision), Text())


def render_outcome(outcome: Outcome, decision: Decision | None, origins: Origins) -> RenderableType:
    """The measured outcome, with the overlap that the decision expected, and its account."""
    lines = [
        f"{outcome.request}: {outcome.finish} on {outcome.instance} at {_clock(outcome.time)}",
        f"  {_ttft(outcome.ttft_s)}, all {outcome.output_tokens:,} after {_ms(outcome.total_s)}",
        f"  cached {outcome.cached_tokens:,} prompt tokens{_expected(decision)}",
    ]
    if sender := _sender(outcome):
        lines.append(f"  {sender}")
    if outcome.cache is not None:
        account = outcome.cache
        block = last_shared(account, decision)
        first = origins.first(block) if block is not None else None
        about = account_lines(account, outcome.cached_tiers, origins.name, first)
        lines += [f"  {line}" for line in about]
    if outcome.ahead is not None:
        lines.append(f"  {_ahead(outcome.ahead)}")
    return Group(literal_lines(lines), Text())


def best_rejected(decision: Decision) -> Candidate | None:
    """The cheapest candidate that was not chosen."""
    chosen = (decision.chosen.instance, decision.chosen.rank)
    others = [c for c in decision.candidates if (c.instance, c.rank) != chosen]
    return min(others, key=lambda c: c.cost, default=None)


def _caller(hints: Hints) -> str:
    """The session, class and priority that the request names; empty if it names none."""
    parts = {
        "session": own_name(hints.session or ""),
        "child of": own_name(hints.parent_session or ""),
        "class": "/".join(name for name in (hints.tenant, hints.fair_class) if name),
        "priority": hints.priority or "",
        "strict priority": hints.strict_priority or "",
        "latency sensitivity": hints.latency_sensitivity or "",
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def _sender(outcome: Outcome) -> str:
    """The tenant, the key and the client's own id of a request, if it has any; its device time."""
    parts = {"tenant": outcome.tenant, "key": outcome.key, "client's id": outcome.client}
    named = [f"{name} {value}" for name, value in parts.items() if value]
    if outcome.device_s:
        named.append(f"{_ms(outcome.device_s)} of device time")
    return ", ".join(named)


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


def prefetch_lines(request: str, uses: PrefetchUses) -> Iterator[list[str]]:
    """Lines on each prefetch that a request ended, or on the prefetch with this id."""
    own = uses.of_prefetch(request)
    for use in [own] if own is not None else uses.of_request(request):
        placed, rank = use.prefetch, use.rank
        lines = [
            f"{placed.request} at {_clock(placed.time)} on {rank.worker} rank {rank.rank}"
            f" ({rank.instance}): {_aim(use)}"
        ]
        if use.request is None:
            lines.append("  no request with its prompt or of its session has come since")
        else:
            after = use.request.time - placed.time
            lines.append(f"  {use.request.request} came {_ms(after)} later{_use(use)}")
        yield lines


def _terms(terms: PrefetchTerms) -> str:
    compute = f", computing {terms.compute:,} tokens at most" if terms.compute else ""
    at = "now" if terms.at is None else f"by {_clock(terms.at)}"
    return f"a prefetch: to be loaded {at}{compute}, for {terms.deadline_s:g} s"


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


def _clock(seconds: float) -> str:
    stamp = datetime.fromtimestamp(seconds, UTC).astimezone()
    day = "" if time.time() - seconds < 86400 else f"{stamp:%Y-%m-%d} "
    return f"{day}{stamp:%H:%M:%S}.{stamp.microsecond // 1000:03d}"


def _ttft(seconds: float | None) -> str:
    return "no token" if seconds is None else f"first token after {_ms(seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
