"""Requested lifetime of a prompt's cache, in the terms of each API."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.bus.messages import Retain
from kvmesh.frontend.conversation import CacheControl, Image, Text
from kvmesh.frontend.errors import InvalidRequest

UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPHEMERAL_S = 300.0
BREAKPOINT_S = 1800.0
MAX_INT = (1 << 31) - 1
MAX_RANGES = 256

Duration = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,4}[smhd]$")]
CacheRetention = Annotated[str, Meta(pattern=r"^(in[-_]memory|[1-9][0-9]{0,4}[smhd])$")]
TokenIndex = Annotated[int, Meta(ge=0, le=MAX_INT)]
Priority = Annotated[int, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_INT)]


def seconds(duration: str) -> float:
    """The length of a `Duration` such as "5m" or "1h"."""
    return int(duration[:-1]) * UNIT_S[duration[-1]]


class CacheMark(Struct):
    """`cache_control` of the Messages API, of a block, a tool or the whole request."""

    type: str = "ephemeral"
    ttl: Duration | None = None

    def ttl_s(self) -> float:
        return seconds(self.ttl) if self.ttl is not None else EPHEMERAL_S


class CacheBreakpoint(Struct):
    """`prompt_cache_breakpoint` of the OpenAI APIs, of a content part."""

    ttl: Duration | None = None


def to_cache_control(mark: CacheBreakpoint | None) -> CacheControl | None:
    if mark is None:
        return None
    return CacheControl(seconds(mark.ttl) if mark.ttl is not None else BREAKPOINT_S)


def inner_cache_control(content: list[Text | Image]) -> CacheControl | None:
    """The first mark inside a tool result, which applies to the whole result."""
    return next((part.cache for part in content if part.cache is not None), None)


class CacheOptions(Struct):
    """`prompt_cache_options` of the OpenAI APIs; "explicit": only breakpoints count."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Duration | None = None


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
    """Directives for the prompt and the output; raises InvalidRequest for an empty range."""
    if retention is None:
        return [], None
    given = retention if isinstance(retention, RetentionPlan) else RetentionPlan(retention)
    decode = given.decode
    output = None
    if decode is not None:
        output = Retain(0, None, decode.priority, decode.duration_s, "decode", True)
    return [_retain(entry, index) for index, entry in enumerate(given.ranges)], output


def _retain(entry: TokenRange, index: int) -> Retain:
    if entry.end is not None and entry.end <= entry.start:
        where = f"nvext.retention[{index}].end"
        raise InvalidRequest(f"`{where}` must be greater than `start`.", where)
    return Retain(entry.start, entry.end, entry.priority, entry.duration_s, explicit=True)


def cache_ttl_s(retention: str | None, options: CacheOptions | None) -> float | None:
    """Seconds for which an OpenAI request retains its whole prompt; None: the default.

    "in_memory" is the default.
    """
    if options is not None and options.ttl is not None and options.mode != "explicit":
        return seconds(options.ttl)
    if retention is None or retention.startswith("in"):
        return None
    return seconds(retention)
