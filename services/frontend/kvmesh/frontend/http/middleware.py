"""The one way in: every endpoint that reads a body or what is stored lies behind it."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvmesh.frontend import metrics
from kvmesh.frontend.auth.accounts import Account, AccountEntry, Scope
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, Overloaded
from kvmesh.frontend.http.bodies import refuse, unexpected
from kvmesh.frontend.http.error_shape import shape_for

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CALLER = "kvmesh.caller"


class Caller:
    """The sender of a request, its account if keys are asked for, and the time since when.

    `model` is set once it is found to be served, for callers do not choose labels of metrics. `may`
    raises ApiError for a scope that is lacking.
    """

    def __init__(self, gate: Authenticator, http: web.Request, now: float) -> None:
        self._gate = gate
        self._headers = http.headers
        self.account: Account | None = gate.account(http.headers)
        self.tenant = gate.tenant(http.headers)
        self.started = now
        self.model = ""
        self._entry: AccountEntry | None = None

    @property
    def owner(self) -> str:
        """Whose requests wait for each other."""
        return self.account.key.sha256 if self.account is not None else ""

    def enter(self) -> None:
        if self.account is not None:
            self._entry = self.account.enter(self.started)

    def take(self, request: GenerateRequest, body: bytes) -> None:
        """The request turned out to be this one; raises what forbids it."""
        request.size = len(body)
        self._gate.bind(request, self.account)
        if self._entry is not None:
            sequences = max(len(request.prompts), 1) * request.n
            self._entry.widen(sequences, asyncio.get_running_loop().time())

    def leave(self) -> None:
        if self._entry is not None:
            self._entry.leave()

    def may(self, scope: Scope) -> None:
        self._gate.permit(self._headers, scope)


def caller_of(http: web.Request) -> Caller:
    """Set for every request that the entrance has let in."""
    found: Caller = http[CALLER]
    return found


class RequestMiddleware:
    """Lets requests in: known callers within their limits, and no more at once than are served."""

    def __init__(self, gate: Authenticator, max_in_flight: int, open_paths: frozenset[str]) -> None:
        self._gate = gate
        self._most = max_in_flight
        self._open = open_paths
        self._in_flight = 0

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical in self._open:
            return await handler(request)
        status = 499  # unless it is answered, the client has left
        self._in_flight += 1
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            self._in_flight -= 1
            caller: Caller | None = request.get(CALLER)
            model = caller.model if caller is not None else ""
            metrics.requests.labels(request.match_info.route.name or "other", model, status).inc()

    async def _answer(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._in_flight > self._most:
                raise Overloaded("The server is at its limit of concurrent requests.")
            self._gate.check_origin(http.method, http.headers)
            caller = http[CALLER] = Caller(self._gate, http, asyncio.get_running_loop().time())
            caller.enter()
            try:
                return await handler(http)
            finally:
                caller.leave()
        except ApiError as error:
            return refuse(shape_for(http), error)
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            return refuse(shape_for(http), unexpected(error))
