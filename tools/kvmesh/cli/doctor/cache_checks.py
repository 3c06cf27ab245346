"""Checks of what engines serve beside what the index says of them. Pure functions of the facts."""

from collections.abc import Iterator, Mapping, Sequence

from kvmesh.cli.doctor.facts import Facts
from kvmesh.cli.status.findings import Finding, Severity
from kvmesh.cli.status.served import WorkerCache
from kvmesh.observer.cache_text import TIERS

MOST_OFF = 0.5  # share of the tokens that were served, or expected
MIN_PROMPTS = 8
LOST_SHARE = 0.25  # of the blocks in KV events
_LIMITS = {
    "draft": "the index cannot know the last block of a hit: the engine has a draft model, and its"
    " blocks depend on the tokens after them (limit draft)",
    "windows": "the index cannot know all that the engine finds: some layers of its model attend in"
    " windows or chunks, and the index follows one group of layers (limit windows)",
}


def caches(facts: Facts) -> Iterator[Finding]:
    """One finding for each fault of a worker, one for all the others."""
    if facts.caches is None:
        return
    faults = [finding for cache in facts.caches for finding in _of_worker(cache)]
    yield from faults
    off = {finding.subject for finding in faults if finding.severity == "fault"}
    sound = [cache for cache in facts.caches if cache.instance not in off]
    prompts = sum(cache.served.requests for cache in sound)
    if prompts:
        served = sum(sum(cache.served.served) for cache in sound)
        expected = sum(sum(cache.served.expected) for cache in sound)
        text = f"{len(sound)} workers served {served:,} cached tokens of {prompts:,} prompts"
        yield Finding("ok", "caches", f"{text}, routers expected {expected:,}")
    if facts.events_refused:
        yield Finding("note", "caches", "KV events not counted: only an operator may ask workers")
    kept = [cache.kept for cache in sound if cache.kept is not None]
    if kept and any(map(any, kept)):
        totals = [sum(tier) for tier in zip(*kept, strict=True)]
        yield Finding("ok", "events", f"events by medium: {_by_medium(totals, {})}")


def _of_worker(cache: WorkerCache) -> Iterator[Finding]:
    served, instance = cache.served, cache.instance
    tokens, kept = sum(served.served), cache.kept
    if kept is not None and not any(kept) and tokens:
        text = f"the engine serves cached tokens ({tokens:,} of {served.requests} prompts), its"
        yield Finding("fault", instance, f"{text} ledger is empty: no KV event of it is kept")
    if kept is not None and (lost := cache.lost.total() + cache.malformed):
        severity: Severity = "fault" if lost > LOST_SHARE * sum(kept) else "note"
        text = _by_medium(kept, cache.lost)
        if cache.malformed:
            text += f"; {cache.malformed:,} messages malformed"
        yield Finding(severity, instance, f"events by medium: {text}")
    if cache.unplaced:
        text = f"{cache.unplaced:,} blocks wait for a KV event that says what precedes them"
        yield Finding("note", instance, text)
    for limit in cache.limits:
        yield Finding("note", instance, _LIMITS.get(limit, f"the index has the limit {limit}"))
    if served.requests < MIN_PROMPTS:
        return
    by_tier = _signed(served.difference)
    if served.unexpected > MOST_OFF * tokens:
        text = f"it served {served.unexpected:,} cached tokens that routers did not expect"
        hint = "the index lacks blocks of its engine"
        yield Finding("fault", instance, f"{text}, of {tokens:,} ({by_tier}): {hint}")
    if served.missing > MOST_OFF * sum(served.expected):
        text = f"it did not serve {served.missing:,} cached tokens that routers expected"
        hint = "the index has blocks that its engine lacks"
        expected = sum(served.expected)
        yield Finding("fault", instance, f"{text}, of {expected:,} ({by_tier}): {hint}")


def _by_medium(kept: Sequence[int], lost: Mapping[tuple[int, str], int]) -> str:
    """The kept and dropped blocks of engine memory, and of each tier that has any."""
    shown = []
    for tier, (name, blocks) in enumerate(zip(TIERS, kept, strict=False)):
        dropped = [f"{n:,} dropped ({why})" for (at, why), n in sorted(lost.items()) if at == tier]
        if blocks or dropped or not tier:
            shown.append(", ".join([f"{name} {blocks:,} kept", *dropped]))
    return "; ".join(shown)


def _signed(difference: Sequence[int]) -> str:
    parts = (f"{name} {off:+,}" for name, off in zip(TIERS, difference, strict=False) if off)
    return ", ".join(parts) or "by tier as expected"
