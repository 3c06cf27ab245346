"""Requests without a route: 405 with the methods of their path, 404 with the nearest path.

An attempt to open a WebSocket on a path is answered by 426.
"""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from aiohttp import hdrs, web

from kvmesh.frontend.errors import ApiError, MethodNotAllowed, UpgradeRefused

MAX_COMPARED = 100  # characters of a path
MAX_SEGMENTS = 12
MAX_SHOWN = 200
SIMILAR = 0.76  # `moderations` is 0.75 of `conversations`, and no slip in it
VERSION = "v1"


async def unrouted(http: web.Request) -> web.StreamResponse:
    """Raises ApiError: MethodNotAllowed, UpgradeRefused, or 404 for an unknown path."""
    resources = list(http.app.router.resources())[:-1]  # the last one leads here
    allowed: set[str] = set()
    for resource in resources:
        allowed |= (await resource.resolve(http))[1]
    path = http.path[:MAX_SHOWN]
    if allowed and http.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
        raise UpgradeRefused(path, sorted(allowed))
    if allowed:
        raise MethodNotAllowed(http.method, path, sorted(allowed))
    near = nearest(http.path, [resource.canonical for resource in resources])
    hint = f"did you mean {near}? See" if near else "see"
    reason = f"{http.method} {path} does not exist; {hint} /docs."
    raise ApiError("not_found", reason, code="unknown_url")


def nearest(path: str, patterns: Sequence[str]) -> str | None:
    """The path that a client may have meant, by the patterns of those that exist; None if none.

    A pattern's `{name}` stands for one segment.
    """
    if len(path) > MAX_COMPARED or path.count("/") > MAX_SEGMENTS:
        return None
    best, found = 0.0, None
    for segments in _readings(path):
        for pattern in patterns:
            parts = pattern.strip("/").split("/")
            if len(parts) == len(segments) and (score := _similarity(parts, segments)) > best:
                best, found = score, _filled(parts, segments)
    return found


def _readings(path: str) -> Iterator[list[str]]:
    """The segments of a path without empty and doubled ones; its ends, and these in `VERSION`."""
    segments = [segment for segment, _ in groupby(filter(None, path.split("/")))]
    for index in range(len(segments)):
        yield segments[index:]
        yield [VERSION, *segments[index:]]


def _similarity(parts: list[str], segments: list[str]) -> float:
    """1 for segments that match but for upper and lower case, 0 if one is not similar."""
    lowest = 1.0
    for part, segment in zip(parts, segments, strict=True):
        written = segment.lower()
        if part != written and not part.startswith("{"):
            matcher = SequenceMatcher(None, part, written)
            lowest = min(lowest, matcher.ratio() if matcher.quick_ratio() >= SIMILAR else 0.0)
            if lowest < SIMILAR:
                return 0.0
    return lowest


def _filled(parts: list[str], segments: list[str]) -> str:
    named = (s if p.startswith("{") else p for p, s in zip(parts, segments, strict=True))
    return "/" + "/".join(named)
