"""From what is asked for tokens to what is asked for blocks."""

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
    """Blocks `first` to `end` (None: all that follow) of a sequence, and what is asked for them."""

    first: int
    end: int | None
    wish: RetentionWish


class RetentionError(ValueError):
    """A default that cannot be understood; `text` is as it was given."""

    def __init__(self, text: str) -> None:
        kinds = ", ".join(KINDS)
        super().__init__(
            f"{text!r} is not KIND=PRIORITY or KIND=PRIORITY/SECONDS with a priority of 0 to 100 "
            f"or '{FIRST}' and one of the kinds {kinds}"
        )
        self.text = text


def parse_defaults(texts: Sequence[str]) -> dict[str, RetentionWish]:
    """`DEFAULTS` with changes such as "tool=20" or "system=60/300"; raises RetentionError."""
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
    """What a request asks for its blocks; those for which nothing is asked are left out.

    `retention` speaks of the prompt of `tokens` tokens, later entries win; `decode` of what is
    generated behind it. A block takes the highest wish of its tokens: it is kept or lost as a
    whole, and half of it is no use to whoever asked for that half. Wishes count explicit entries
    from 0, the decode's comes last.
    """
    wishes = _parse_wishes(retention, decode, defaults)
    if all(map(_says_nothing, wishes)):
        return []
    spans = [(max(0, r.start), tokens if r.end is None else r.end) for r in retention]
    painted = _paint([(a, min(b, tokens)) for a, b in spans], wishes, tokens)
    painted.append((tokens, None, wishes[-1]))
    return list(_joined(_blocks(painted, block_size)))


def with_prefix(asked: list[RetentionSegment]) -> list[RetentionSegment]:
    """The same with all that comes before what is kept, which is of no use without it.

    It is kept as dearly and counts against the budget, so that a budget cannot be had for less.
    """
    found: list[RetentionSegment] = []
    best: RetentionWish | None = None
    after = 0
    for segment in reversed(asked):
        if best is not None and segment.end is not None and segment.end < after:
            found.append(RetentionSegment(segment.end, after, best))
        wish = segment.wish if best is None else _at_least(segment.wish, best)
        found.append(segment._replace(wish=wish))
        best = wish if wish.keeps else best
        after = segment.first
    if best is not None and after:
        found.append(RetentionSegment(0, after, best))
    return list(_joined(reversed(found)))


def _at_least(wish: RetentionWish, other: RetentionWish) -> RetentionWish:
    """The higher one, in the name of the first if that has one."""
    if _worth(wish) >= _worth(other):
        return wish
    return other if wish.directive is None else other._replace(directive=wish.directive)


def _says_nothing(wish: RetentionWish) -> bool:
    """An explicit wish for the default revises an earlier one."""
    return wish.plain and wish.directive is None


def _parse_wishes(
    retention: Sequence[Retain], decode: Retain | None, defaults: Mapping[str, RetentionWish]
) -> list[RetentionWish]:
    """One for each entry, and one for what is generated."""
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


def _paint(
    spans: list[tuple[int, int]], wishes: list[RetentionWish], tokens: int
) -> list[tuple[int, int | None, RetentionWish]]:
    """The tokens of the prompt in stretches, each with the wish of the last span over it."""
    starts = sorted((start, place) for place, (start, end) in enumerate(spans) if start < end)
    edges = sorted({0, tokens, *(edge for span in spans for edge in span if edge < tokens)})
    over: list[int] = []
    painted: list[tuple[int, int | None, RetentionWish]] = []
    at = 0
    for start, end in pairwise(edges):
        while at < len(starts) and starts[at][0] <= start:
            heapq.heappush(over, -starts[at][1])
            at += 1
        while over and spans[-over[0]][1] <= start:
            heapq.heappop(over)
        painted.append((start, end, wishes[-over[0]] if over else NO_WISH))
    return painted


def _blocks(
    painted: list[tuple[int, int | None, RetentionWish]], size: int
) -> Iterator[RetentionSegment]:
    """Whole blocks: those that lie in one stretch, and one for each where stretches meet."""
    at = 0
    mixed: RetentionWish | None = None
    for _, end, wish in painted:
        if mixed is not None:
            mixed = max(mixed, wish, key=_worth)
            if end is not None and end < (at + 1) * size:
                continue
            yield RetentionSegment(at, at + 1, mixed)
            at += 1
            mixed = None
        if end is None:
            yield RetentionSegment(at, None, wish)
            return
        if end // size > at:
            yield RetentionSegment(at, end // size, wish)
            at = end // size
        if end % size:
            mixed = wish


def _worth(wish: RetentionWish) -> tuple[int, float]:
    """As in `Standing`: among equals, plain ones go before those that are kept for a while."""
    if wish.level != DEFAULT_LEVEL:
        return wish.level, float("inf") if wish.ttl_s is None else wish.ttl_s
    return wish.level, wish.ttl_s or 0.0


def _joined(blocks: Iterable[RetentionSegment]) -> Iterator[RetentionSegment]:
    """As few segments as possible, without those that ask for nothing."""
    last: RetentionSegment | None = None
    for segment in blocks:
        if last is not None and last.wish == segment.wish:
            last = last._replace(end=segment.end)
            continue
        if last is not None and not _says_nothing(last.wish):
            yield last
        last = segment
    if last is not None and not _says_nothing(last.wish):
        yield last
