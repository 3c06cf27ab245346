"""Retention as callers write it in the body of a request: marks, token ranges, durations."""

from collections.abc import Iterable
from math import inf
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.bus.messages import Retain

UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPHEMERAL_S = 300.0
RETAIN_PRIORITY = 75  # of tokens that a caller retains for a time
MAX_INT = (1 << 31) - 1
MAX_RANGES = 256

Duration = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,4}[smhd]$")]
TokenIndex = Annotated[int, Meta(ge=0, le=MAX_INT)]
Priority = Annotated[int, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_INT)]


class EmptyRange(ValueError):
    """The entry `index` of the ranges ends before it starts."""

    def __init__(self, index: int) -> None:
        super().__init__(f"range {index}: `end` must be greater than `start`")
        self.index = index


def seconds(duration: str) -> float:
    """The length of a `Duration` such as "5m" or "1h"."""
    return int(duration[:-1]) * UNIT_S[duration[-1]]


class CacheMark(Struct):
    """`cache_control` of the Messages API, of a block, a tool or the whole request."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Duration | None = None

    def ttl_s(self) -> float:
        return seconds(self.ttl) if self.ttl is not None else EPHEMERAL_S


class DecodeRange(Struct):
    """Retention of the output."""

    priority: Priority = 35
    duration_s: Seconds | None = None


class TokenRange(Struct):
    """Retention of tokens `start` to `end` (exclusive) of the prompt; None: to its end."""

    start: TokenIndex
    end: TokenIndex | None = None
    priority: Priority = 35
    duration_s: Seconds | None = None


class RetentionPlan(Struct):
    """Retention of the output and of ranges of the prompt; later ranges override earlier ones."""

    ranges: Annotated[list[TokenRange], Meta(max_length=MAX_RANGES)] = []
    decode: DecodeRange | None = None


Retention = Annotated[list[TokenRange], Meta(max_length=MAX_RANGES)] | RetentionPlan


def to_directives(retention: Retention | None) -> tuple[list[Retain], Retain | None]:
    """Directives for the prompt and the output; raises EmptyRange."""
    if retention is None:
        return [], None
    given = retention if isinstance(retention, RetentionPlan) else RetentionPlan(retention)
    decode = given.decode
    output = None
    if decode is not None:
        output = Retain(0, None, decode.priority, decode.duration_s, "decode", True)
    return [_retain(entry, index) for index, entry in enumerate(given.ranges)], output


def retained_prefixes(marks: Iterable[tuple[int | None, float]]) -> list[Retain]:
    """Directives for cache marks: (tokens before the mark, time to live in seconds).

    None is a mark after the whole prompt. There is one directive per time to live, up to the last
    mark with it; the one with the longest comes last.
    """
    ends: dict[float, float] = {}
    for end, ttl_s in marks:
        ends[ttl_s] = max(inf if end is None else end, ends.get(ttl_s, 0))
    return [
        Retain(0, None if end == inf else int(end), RETAIN_PRIORITY, ttl_s, explicit=True)
        for ttl_s, end in sorted(ends.items())
    ]


def _retain(entry: TokenRange, index: int) -> Retain:
    if entry.end is not None and entry.end <= entry.start:
        raise EmptyRange(index)
    return Retain(entry.start, entry.end, entry.priority, entry.duration_s, explicit=True)
