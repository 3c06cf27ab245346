"""A placement and its outcome in words: the reasons for a worker, and what came true. Pure."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import inf

from kvmesh.bus.messages import (
    Candidate,
    ComputedAhead,
    Decision,
    ExpectedReturn,
    Hints,
    Outcome,
    PrefetchTerms,
    PrefixWait,
    ShownAnswers,
)
from kvmesh.frontend.namespaces import own_name
from kvmesh.hashing import HASH_BYTES
from kvmesh.observer.pauses import wait_text
from kvmesh.observer.prefetch_uses import prompt_rank
from kvmesh.observer.returns import WITHIN, expected_rates, median_s
from kvmesh.returns.rates import share_returned

TIERS = ("engine", "host", "disk", "remote")


def decision_lines(decision: Decision) -> Iterator[str]:
    """Lines on a placement: the request first, then the chosen worker, its time and its reasons."""
    chosen = decision.chosen
    blocks = len(decision.sequence_hashes) // HASH_BYTES
    prompt = f"{decision.tokens:,} tokens of {decision.model}"
    yield f"{decision.request}: {prompt}, {blocks} full blocks"
    yield (
        f"to {chosen.worker} rank {chosen.rank} ({chosen.instance}) by {decision.policy}"
        f" at {clock_text(decision.time)}, decided by {decision.router}"
    )
    waits = time_text(decision.wait_s), time_text(decision.index_s)
    yield f"waited {waits[0]} in the queue, {waits[1]} for the index"
    for wait in decision.prefix_waits:
        yield _prefix_wait(wait, decision.block_size)
    if caller := _caller(decision.hints):
        yield caller
    if decision.attempt:
        yield f"attempt {decision.attempt + 1}: earlier workers refused or lost it"
    if decision.prefill is not None:
        first = decision.prefill
        yield f"prefill on {first.worker} rank {first.rank} ({first.instance})"
    if decision.note:
        yield f"note: {decision.note}"
    if decision.expected is not None:
        yield from _expected_lines(decision.expected, decision)
    if decision.prefetch is not None:
        yield _terms(decision.prefetch)
    best = best_rejected(decision)
    if best is not None:
        yield _margin(chosen, best)


def outcome_lines(outcome: Outcome, decision: Decision | None) -> list[str]:
    """Lines on the end of a request: the request first; without the account of its prompt."""
    total = time_text(outcome.total_s)
    lines = [
        f"{outcome.request}: {outcome.finish} on {outcome.instance} at {clock_text(outcome.time)}",
        f"{_ttft(outcome.ttft_s)}, all {outcome.output_tokens:,} after {total}",
        f"cached {outcome.cached_tokens:,} prompt tokens{_expected(decision)}",
    ]
    if unexpected := _unexpected(outcome, decision):
        lines.append(unexpected)
    if sender := _sender(outcome):
        lines.append(sender)
    if outcome.shown is not None:
        lines.append(shown_line(outcome.shown))
    if outcome.conversation:
        lines.append(_conversation(outcome))
    return lines


def shown_line(shown: ShownAnswers) -> str:
    """The earlier answers shown as they were generated, and what the client had made of them."""
    changes = [
        (shown.thinking, "without their thinking"),
        (shown.calls, "with tool calls in other words"),
    ]
    returned = [f"{count} {how}" for count, how in changes if count]
    by_client = f" (the client returned {' and '.join(returned)})" if returned else ""
    edited = f"; {shown.edited} that the client had edited as sent" if shown.edited else ""
    answers = f"{shown.answers} earlier answer{'' if shown.answers == 1 else 's'}"
    return f"the prompt shows {answers} as generated{by_client}{edited}"


def moved(expected: ExpectedReturn, decision: Decision) -> bool:
    """True if the prompt was placed on another rank than the one that it continues."""
    rank = prompt_rank(decision)
    return (rank.instance, rank.rank) != (expected.instance, expected.rank)


def forecast_text(expected: ExpectedReturn, elsewhere: bool) -> str:
    """The ground of a forecast; `elsewhere`: the session went on elsewhere."""
    known = {"class": "as learned", "tool": "the known end of its tool", "": "none"}
    withdrawn = ", then withdrawn" if elsewhere and expected.by else ""
    return known.get(expected.by, expected.by) + withdrawn


def shares_text(rates: Sequence[float] | None) -> str:
    """The shares of prompts that return within WITHIN, and the time within which half do."""
    if rates is None:
        return ""
    shares = ", ".join(f"{share_returned(rates, s):.0%} in {name}" for name, s in WITHIN.items())
    half = median_s(rates)
    return f"{shares}, half in {time_text(half)}" if half < inf else shares


def _expected_lines(expected: ExpectedReturn, decision: Decision) -> Iterator[str]:
    """Lines on the return that was expected of the turn before, and on what came."""
    waits = wait_text(expected.waits) if expected.waits else "something unknown"
    yield (
        f"continues {expected.after}, {time_text(expected.pause_s)} after its end;"
        f" its session waited for {waits}"
    )
    age = expected.since - expected.ended
    start = f" (from {time_text(age)} after that end on)" if age > 0.05 else ""
    by = forecast_text(expected, moved(expected, decision))
    yield (
        f"expected back{start}: {shares_text(expected_rates(expected)) or 'not known'};"
        f" forecast: {by}"
    )


def best_rejected(decision: Decision) -> Candidate | None:
    """The cheapest candidate that was not chosen."""
    chosen = (decision.chosen.instance, decision.chosen.rank)
    others = [c for c in decision.candidates if (c.instance, c.rank) != chosen]
    return min(others, key=lambda c: c.cost, default=None)


def compared(decision: Decision) -> list[Candidate]:
    """The candidates that a decision names, cheapest first, with the chosen one."""
    shown = decision.candidates or [decision.chosen]
    if not any(is_same(candidate, decision.chosen) for candidate in shown):
        shown = [*shown, decision.chosen]
    return shown


def overlap_tiers(decision: Decision) -> dict[str, int]:
    """Headings and indices of the first tier and of those in which a candidate has an overlap."""
    tiers = range(len(decision.chosen.overlap))
    candidates = [decision.chosen, *decision.candidates]
    used = [tier for tier in tiers if tier == 0 or any(c.overlap[tier] for c in candidates)]
    return {f"{TIERS[tier]} blocks": tier for tier in used if tier < len(TIERS)}


def is_same(one: Candidate, other: Candidate) -> bool:
    """True if both are the same rank."""
    return (one.instance, one.rank) == (other.instance, other.rank)


def ahead_line(ahead: ComputedAhead) -> str:
    """The use of the tokens that a speculative prefill was to compute."""
    use = f"{ahead.used:,} of them used" if ahead.used else "none used"
    reason = ", as this prompt differs from the predicted one" if ahead.differs else ""
    until = ahead.first + ahead.tokens
    return (
        f"{ahead.tokens:,} tokens ({ahead.first:,} to {until:,}) were to be computed ahead"
        f" after {ahead.after}: {use}{reason}"
    )


def clock_text(seconds: float) -> str:
    """The local time, with the day unless it is within the last 24 hours."""
    try:
        stamp = datetime.fromtimestamp(seconds, UTC).astimezone()
    except (ValueError, OverflowError, OSError):  # of a process whose clock is far off
        return f"{seconds:g}"
    day = "" if time.time() - seconds < 86400 else f"{stamp:%Y-%m-%d} "
    return f"{day}{stamp:%H:%M:%S}.{stamp.microsecond // 1000:03d}"


def time_text(seconds: float) -> str:
    """A time span in milliseconds, from one second on in seconds."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _prefix_wait(wait: PrefixWait, block_size: int) -> str:
    ends = {
        "computed": "which computed",
        "late": "which took longer than another worker would have to compute",
        "lost": "which ended before it had computed",
    }
    what = f"the same {wait.blocks * block_size:,} first tokens on {wait.worker} rank {wait.rank}"
    end = ends.get(wait.end, f"({wait.end}) which computed")
    return f"of that {time_text(wait.seconds)} for request {wait.request}, {end} {what}"


def _caller(hints: Hints) -> str:
    """The session, class and priority that the request names; empty if it names none."""
    parts = {
        "session": own_name(hints.session or ""),
        "child of": own_name(hints.parent_session or ""),
        "forked from": own_name(hints.forked_from or ""),
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
        named.append(f"{time_text(outcome.device_s)} of device time")
    return ", ".join(named)


def _conversation(outcome: Outcome) -> str:
    """The conversation, the agent, and the request whose prompt is compared."""
    previous = None if outcome.cache is None else outcome.cache.previous
    after = f", continues {previous}" if previous else ""
    agent = f" of {outcome.agent}" if outcome.agent else ""
    return f"conversation {outcome.conversation}{agent}{after}"


def _margin(chosen: Candidate, best: Candidate) -> str:
    difference = best.cost - chosen.cost
    name = f"{best.worker} rank {best.rank}"
    if difference == 0:
        return f"same cost as {name}"
    word = "cheaper" if difference > 0 else "more expensive"
    return f"{abs(difference):.1f} {word} than the best alternative, {name}"


def _expected(decision: Decision | None) -> str:
    if decision is None or not decision.block_size:
        return ""
    expected = sum(prompt_rank(decision).overlap) * decision.block_size
    return f", expected {expected:,}"


def _unexpected(outcome: Outcome, decision: Decision | None) -> str:
    """The reason of cached tokens that the index did not know of; empty without any."""
    if decision is None or not decision.block_size or decision.prefill is not None:
        return ""
    if outcome.attempts != 1 or outcome.ahead is not None:
        return ""
    size, possible = decision.block_size, decision.possible
    known = sum(decision.chosen.overlap) if possible is None else possible.chosen
    unknown = (outcome.cached_tokens // size - known) * size
    if unknown <= 0:
        return ""
    source = "served from a tier that announces nothing"
    just_before = possible is not None and possible.running > known
    either = "computed just before by another request, or " if just_before else ""
    return f"{unknown:,} of them were {either}{source}"


def _terms(terms: PrefetchTerms) -> str:
    compute = f", computing {terms.compute:,} tokens at most" if terms.compute else ""
    at = "now" if terms.at is None else f"by {clock_text(terms.at)}"
    return f"a prefetch: to be loaded {at}{compute}, for {terms.deadline_s:g} s"


def _ttft(seconds: float | None) -> str:
    return "no token" if seconds is None else f"first token after {time_text(seconds)}"
