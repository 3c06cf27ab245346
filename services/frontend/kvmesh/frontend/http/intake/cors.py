"""Cross-origin access: web pages of the configured origins may call the API."""

from collections.abc import Iterable

from aiohttp import hdrs, web

from kvmesh.frontend.http.request_id import ANTHROPIC_HEADER, HEADER

EVERY = "*"
MAX_AGE_S = 600
EXPOSED = ", ".join((HEADER, ANTHROPIC_HEADER, hdrs.RETRY_AFTER, "X-Should-Retry"))

VARYING = f"{hdrs.ACCESS_CONTROL_REQUEST_METHOD}, {hdrs.ACCESS_CONTROL_REQUEST_HEADERS}"


class CrossOrigin:
    """Answers preflights and marks answers for pages of `origins`; "*" stands for every origin.

    Keys are sent in headers that pages set themselves, so credentials that browsers add by
    themselves (cookies) are never allowed.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)

    def allows(self, origin: str | None) -> bool:
        """True for pages of this origin; never for requests without one."""
        if origin is None:
            return False
        return EVERY in self._origins or origin.lower() in self._origins

    def preflight(self, http: web.Request) -> web.Response | None:
        """The answer to a preflight of an allowed page; None for other requests."""
        if http.method != hdrs.METH_OPTIONS or not self.allows(http.headers.get(hdrs.ORIGIN)):
            return None
        method = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD, "")
        asked = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if not method or not (method + asked).isascii():
            return None
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: method,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
            hdrs.VARY: VARYING,
        }
        return web.Response(status=204, headers=headers)

    async def add_headers(self, http: web.Request, response: web.StreamResponse) -> None:
        """Signal handler that lets the page read a response, streams and errors included."""
        origin = http.headers.get(hdrs.ORIGIN)
        if self._origins and EVERY not in self._origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)  # also where the origin is not allowed
        if origin is not None and self.allows(origin):
            allowed = EVERY if EVERY in self._origins else origin
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
