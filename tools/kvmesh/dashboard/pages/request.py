"""One request: its way through the processes, the reasons for its worker, and what came true."""

import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from nicegui import ui

from kvmesh.bus.messages import Decision, Outcome, Role, RouteEvent
from kvmesh.dashboard.elements.charts import COLOURS
from kvmesh.dashboard.elements.lanes import swatch
from kvmesh.dashboard.elements.links import linked, session_href
from kvmesh.dashboard.elements.plain_table import plain_table
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.requests.parts import RequestPart, request_parts
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.observer.cache_text import account_lines
from kvmesh.observer.decision_text import (
    TIERS,
    ahead_line,
    clock_text,
    compared,
    decision_lines,
    is_same,
    outcome_lines,
    overlap_tiers,
    time_text,
)
from kvmesh.observer.origins import last_shared, origins_of
from kvmesh.observer.prefetch_uses import prompt_rank
from kvmesh.runtime.logs import printable

PARTS = {
    "prepare": COLOURS[6],
    "router's queue": COLOURS[4],
    "index": COLOURS[2],
    "route": COLOURS[3],
    "engine's queue": COLOURS[1],
    "prefill": COLOURS[5],
    "decode": COLOURS[0],
}
STATES = {
    "waiting": "It waits in a router's queue.",
    "prefill": "A worker computes its prompt.",
    "decode": "A worker generates its tokens.",
    "left": "It has left without an outcome: it was refused, cancelled early, or migrates now; or"
    " its frontend has ended.",
}


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page of the request with the id of the URL."""
    name = query.get("id", "")
    ui.label(printable(name)).classes("subject mono")
    state = ui.label().props('role="status"')
    bar = ui.element("div").props('aria-hidden="true"')  # the table of parts has the same
    content = ui.element("div")
    seen: SeenRequest | None = None
    shown: tuple[object, ...] = ()

    def refresh() -> None:
        nonlocal seen, shown
        # once found it stays on the page, even after it has left the window
        seen = seen or (mesh.requests.get(name) if name else None)
        state.text = _state(seen, name, mesh.window_s)
        if seen is None:
            return
        known = seen.state, len(seen.decisions), seen.instance
        if known == shown and seen.outcome is not None:
            return
        parts = request_parts(seen, time.time(), _frontend(mesh))
        _draw_bar(bar, parts)
        if known != shown:
            shown = known
            content.clear()
            with content:
                _content(mesh, seen, parts)

    every(REFRESH_S, refresh)


def _state(seen: SeenRequest | None, name: str, window_s: float) -> str:
    if seen is None:
        return (
            f"No request with this id within the last {window_s / 60:g} minutes."
            f" The whole stream has: kvmesh explain {printable(name)[:200] or 'ID'}"
        )
    if seen.outcome is not None:
        return f"Ended at {clock_text(seen.outcome.time)}: {seen.outcome.finish}."
    age = time_text(max(time.time() - seen.arrived, 0.0))
    return f"{STATES[seen.state]} {seen.generated:,} tokens so far, {age} after its arrival."


def _frontend(mesh: Mesh) -> str:
    """The only frontend; no event names one of several."""
    names = [card.instance for card in mesh.cards.values() if card.role is Role.FRONTEND]
    return names[0] if len(names) == 1 else "frontend"


def _draw_bar(bar: ui.element, parts: list[RequestPart]) -> None:
    total = sum(part.seconds or 0.0 for part in parts) or 1.0
    bar.clear()
    with bar:
        with ui.element("div").classes("parts"):
            for part in parts:
                if part.seconds:
                    width = f"width: {100 * part.seconds / total:.2f}%"
                    ui.element("span").style(f"{width}; background: {PARTS[part.name]}")
        with ui.element("ul").classes("legend"):
            for part in parts:
                if part.seconds:
                    swatch(f"{part.name} {time_text(part.seconds)}", PARTS[part.name])


def _content(mesh: Mesh, seen: SeenRequest, parts: list[RequestPart]) -> None:
    if seen.session:
        with ui.element("div").classes("line"):
            ui.label("A turn of session ")
            tenant = mesh.requests.lanes.tenant(seen)
            ui.link(printable(seen.session), session_href(tenant, seen.session))
    heading("Time")
    _time_table(seen, parts)
    for decision in seen.decisions:
        heading("Placement" if len(seen.decisions) == 1 else f"Placement {decision.request}")
        _placement(decision)
    if seen.outcome is not None:
        heading("Outcome")
        _outcome(mesh, seen, seen.outcome)


def _time_table(seen: SeenRequest, parts: list[RequestPart]) -> None:
    total = sum(part.seconds or 0.0 for part in parts) or 1.0
    at = seen.arrived
    rows = []
    for part in parts:
        if part.seconds is None:
            rows.append((part.name, part.process, "", "not reported", ""))
            continue
        runs = seen.outcome is None and part is parts[-1]
        times = (
            ("until now", "") if runs else (time_text(part.seconds), f"{part.seconds / total:.1%}")
        )
        rows.append((part.name, part.process, clock_text(at), *times))
        at += part.seconds
    plain_table("time by part", ("part", "process", "from", "time", "share"), rows, 3)


def _placement(decision: Decision) -> None:
    for line in decision_lines(decision):
        linked(line, ())
    tiers = overlap_tiers(decision)
    rows = [
        (
            "chosen" if is_same(each, decision.chosen) else "",
            each.worker,
            str(each.rank),
            *(f"{each.overlap[tier]:,}" for tier in tiers.values()),
            f"{each.prefill:,.1f}",
            f"{each.decode:,.1f}",
            f"{each.requests:,}",
            f"{each.cost:,.2f}",
        )
        for each in sorted(compared(decision), key=lambda candidate: candidate.cost)
    ]
    numbers = (*tiers, "prefilling", "decoding", "requests", "cost")
    plain_table("candidates", ("", "worker", "rank", *numbers), rows, len(numbers))
    if (more := decision.eligible - len(rows)) > 0:
        ui.label(f"and {more:,} more").classes("quiet")


def _outcome(mesh: Mesh, seen: SeenRequest, outcome: Outcome) -> None:
    decision = seen.decision
    named = set(_named(outcome))
    lines = outcome_lines(outcome, decision)
    if (account := outcome.cache) is not None:
        events: list[RouteEvent] = [outcome]
        events += [decision] if decision is not None else []
        origins = origins_of(events)
        if origins:
            for each in reversed(list(mesh.requests.latest())):
                for earlier in each.decisions:
                    origins.add_decision(earlier)
        block = last_shared(account, decision)
        first = origins.first(block) if block is not None else None
        if first is not None:
            named.add(first.partition(" ")[0])
        lines += account_lines(account, outcome.cached_tiers, origins.name, first)
        if account.previous and not account.own:
            lines.append(f"the session's last request is {account.previous}")
    if outcome.ahead is not None:
        lines.append(ahead_line(outcome.ahead))
        named.add(outcome.ahead.after)
    for line in lines:
        linked(line, named - {seen.request})
    rows = list(_by_tier(outcome, decision))
    if rows:
        plain_table("cached tokens by tier", ("tier", "expected", "found"), rows, 2)


def _by_tier(outcome: Outcome, decision: Decision | None) -> Iterator[tuple[str, str, str]]:
    """The tokens that the placement expected in each tier, and those that the engine found."""
    if decision is None or not decision.block_size or not outcome.cached_tiers:
        return
    expected = [blocks * decision.block_size for blocks in prompt_rank(decision).overlap]
    for tier, wanted, found in zip_longest(TIERS, expected, outcome.cached_tiers, fillvalue=0):
        if wanted or found or tier == TIERS[0]:
            yield str(tier or "other"), f"{wanted:,}", f"{found:,}"


def _named(outcome: Outcome) -> Iterator[str]:
    """The requests that an account names."""
    if (account := outcome.cache) is None:
        return
    if account.previous:
        yield account.previous
    yield from (loss.request for loss in account.losses if loss.request)
