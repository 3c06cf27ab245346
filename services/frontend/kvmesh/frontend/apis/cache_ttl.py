"""Requested lifetime of a prompt's cache, in the terms of the OpenAI APIs."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.frontend.conversation import CacheControl, ResultPart
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.retention.hints import Duration, seconds

BREAKPOINT_S = 1800.0
CACHE_ALONE = "/v1/prefetch caches a prompt without an answer"

CacheRetention = Annotated[str, Meta(pattern=r"^(in[-_]memory|[1-9][0-9]{0,4}[smhd])$")]


class CacheBreakpoint(Struct):
    """`prompt_cache_breakpoint` of the OpenAI APIs, of a content part."""

    ttl: Duration | None = None


def to_cache_control(mark: CacheBreakpoint | None) -> CacheControl | None:
    if mark is None:
        return None
    return CacheControl(seconds(mark.ttl) if mark.ttl is not None else BREAKPOINT_S)


def inner_cache_control(content: Sequence[ResultPart]) -> CacheControl | None:
    """The first mark inside a tool result, which applies to the whole result."""
    return next((part.cache for part in content if part.cache is not None), None)


class CacheOptions(Struct):
    """`prompt_cache_options` of the OpenAI APIs; "explicit": only breakpoints count."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Duration | None = None
    prewarm: bool | None = None


def cache_ttl_s(retention: str | None, options: CacheOptions | None) -> float | None:
    """Seconds for which an OpenAI request retains its whole prompt; None: the default.

    "in_memory" is the default. Raises InvalidRequest for a request that is not to be answered.
    """
    if options is not None and options.prewarm:
        field = "prompt_cache_options.prewarm"
        raise InvalidRequest(f"`{field}` is not supported; {CACHE_ALONE}.", field)
    if options is not None and options.ttl is not None and options.mode != "explicit":
        return seconds(options.ttl)
    if retention is None or retention.startswith("in"):
        return None
    return seconds(retention)
