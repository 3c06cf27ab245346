"""Retention of blocks from retention of tokens."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from kvmesh.bus.messages import Retain
from kvmesh.retention.claims import DEFAULT_LEVEL, MAX_LEVEL, THINKING_LEVEL, RetentionWish

KINDS = ("system", "conversation", "tool", "thinking", "decode")
FIRST = "first"
DEFAULTS: Mapping[str, RetentionWish] = MappingProxyType(
    {"thinking": RetentionWish(THINKING_LEVEL)}
)
NO_WISH = RetentionWish()


class RetentionSegment(NamedTuple):
    """A wish for blocks `first` to `end` (exclusive; None: all that follow) of a sequence."""

    first: int
    end: int | None
    wish: RetentionWish


class RetentionError(ValueError):
    """Malformed retention default `text`."""

    def __init__(self, text: str) -> None:
        kinds = ", ".join(KINDS)
        super().__init__(
            f"{text!r} is not KIND=PRIORITY or KIND=PRIORITY/SECONDS with a priority of 0 to 100 "
            f"or '{FIRST}' and one of the kinds {kinds}"
        )
        self.text = text


def parse_defaults(texts: Sequence[str]) -> dict[str, RetentionWish]:
    """Return `DEFAULTS` changed by entries such as "tool=20" or "system=60/300".

    Raises RetentionError.
    """
    table = dict(DEFAULTS)
    for text in texts:
        kind, _, value = text.partition("=")
        level, _, ttl = value.partition("/")
        try:
            wish = RetentionWish(
                THINKING_LEVEL if level == FIRST else int(level), float(ttl or 0) or None
            )
        except ValueError as error:
            raise RetentionError(text) from error
        if (
            kind not in KINDS
            or not THINKING_LEVEL <= wish.level <= MAX_LEVEL
            or (wish.ttl_s or 0) < 0
        ):
            raise RetentionError(text)
        table[kind] = wish
    return table


def segments(
    retention: Sequence[Retain],
    decode: Retain | None,
    tokens: int,
    block_size: int,
    defaults: Mapping[str, RetentionWish] = DEFAULTS,
) -> list[RetentionSegment]:
    """Return a request's wishes for its blocks, without blocks at the default.

    `retention` is for the prompt of `tokens` tokens, where later entries win; `decode` is for the
    generated tokens. A block gets the highest wish of its tokens, because it is evicted as a whole.
    `RetentionWish.directive` counts explicit entries from 0; that of `decode` is last.
    """
    wishes = _parse_wishes(retention, decode, defaults)
    if all(map(_has_no_effect, wishes)):
        return []
    spans = [(max(0, r.start), tokens if r.end is None else r.end) for r in retention]
    ranges = _divide([(a, min(b, tokens)) for a, b in spans], wishes, tokens)
    ranges.append((tokens, None, wishes[-1]))
    return list(_merged(_to_blocks(ranges, block_size)))


def with_prefix(requested: list[RetentionSegment]) -> list[RetentionSegment]:
    """Extend retention to all preceding blocks, without which retained blocks are useless.

    The preceding blocks get the same rank and are charged to the budget, so that a tenant cannot
    retain more than it is charged for.
    """
    found: list[RetentionSegment] = []
    best: RetentionWish | None = None
    after = 0
    for segment in reversed(requested):
        if best is not None and segment.end is not None and segment.end < after:
            found.append(RetentionSegment(segment.end, after, best))
        wish = segment.wish if best is None else _at_least(segment.wish, best)
        found.append(segment._replace(wish=wish))
        best = wish if wish.needs_budget else best
        after = segment.first
    if best is not None and after:
        found.append(RetentionSegment(0, after, best))
    return list(_merged(reversed(found)))


def retained_end(
    retention: Sequence[Retain], longest: int, defaults: Mapping[str, RetentionWish] = DEFAULTS
) -> int:
    """Return where the last retained range ends, if after at most `longest` tokens; else 0."""
    wishes = _parse_wishes(retention, None, defaults)
    ranges = zip(retention, wishes, strict=False)
    ends = (r.end for r, wish in ranges if r.end is not None and wish.needs_budget)
    return max((end for end in ends if end <= longest), default=0)


def _at_least(wish: RetentionWish, other: RetentionWish) -> RetentionWish:
    """Return the higher wish, with the directive of `wish` if it has one."""
    if _sort_key(wish) >= _sort_key(other):
        return wish
    return other if wish.directive is None else other._replace(directive=wish.directive)


def _has_no_effect(wish: RetentionWish) -> bool:
    """True if the wish has no effect; an explicit default overrides an earlier wish."""
    return wish.is_default and wish.directive is None


def _parse_wishes(
    retention: Sequence[Retain], decode: Retain | None, defaults: Mapping[str, RetentionWish]
) -> list[RetentionWish]:
    """Return one wish per entry, then one for the generated tokens."""
    wishes: list[RetentionWish] = []
    explicit = 0
    for retain in (*retention, decode or Retain(0, None, kind="decode")):
        if retain.explicit:
            wishes.append(
                RetentionWish(min(MAX_LEVEL, max(0, retain.priority)), retain.ttl_s, explicit)
            )
            explicit += 1
        else:
            wishes.append(defaults.get(retain.kind, NO_WISH))
    return wishes


def _divide(
    spans: list[tuple[int, int]], wishes: list[RetentionWish], tokens: int
) -> list[tuple[int, int | None, RetentionWish]]:
    """Divide the prompt's tokens into ranges; each has the wish of the last span that covers it."""
    starts = sorted((start, index) for index, (start, end) in enumerate(spans) if start < end)
    edges = sorted({0, tokens, *(edge for span in spans for edge in span if edge < tokens)})
    open_spans: list[int] = []  # heap of negated indices: the last one counts
    ranges: list[tuple[int, int | None, RetentionWish]] = []
    at = 0
    for start, end in pairwise(edges):
        while at < len(starts) and starts[at][0] <= start:
            heapq.heappush(open_spans, -starts[at][1])
            at += 1
        while open_spans and spans[-open_spans[0]][1] <= start:
            heapq.heappop(open_spans)
        ranges.append((start, end, wishes[-open_spans[0]] if open_spans else NO_WISH))
    return ranges


def _to_blocks(
    ranges: list[tuple[int, int | None, RetentionWish]], size: int
) -> Iterator[RetentionSegment]:
    """Yield the blocks within each range, and one segment per block that spans several ranges."""
    at = 0
    boundary: RetentionWish | None = None
    for _, end, wish in ranges:
        if boundary is not None:
            boundary = max(boundary, wish, key=_sort_key)
            if end is not None and end < (at + 1) * size:
                continue
            yield RetentionSegment(at, at + 1, boundary)
            at += 1
            boundary = None
        if end is None:
            yield RetentionSegment(at, None, wish)
            return
        if end // size > at:
            yield RetentionSegment(at, end // size, wish)
            at = end // size
        if end % size:
            boundary = wish


def _sort_key(wish: RetentionWish) -> tuple[int, float]:
    """Order wishes as `EvictionRank` does: at the default level a wish without a TTL is lowest."""
    if wish.level != DEFAULT_LEVEL:
        return wish.level, float("inf") if wish.ttl_s is None else wish.ttl_s
    return wish.level, wish.ttl_s or 0.0


def _merged(blocks: Iterable[RetentionSegment]) -> Iterator[RetentionSegment]:
    """Merge adjacent segments with equal wishes; leave out those without effect."""
    last: RetentionSegment | None = None
    for segment in blocks:
        if last is not None and last.wish == segment.wish:
            last = last._replace(end=segment.end)
            continue
        if last is not None and not _has_no_effect(last.wish):
            yield last
        last = segment
    if last is not None and not _has_no_effect(last.wish):
        yield last
