"""Middleware of every route: admission, authentication, account limits, errors, request counts."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvmesh.frontend import metrics
from kvmesh.frontend.auth.accounts import Account, AccountEntry, Scope
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, Overloaded
from kvmesh.frontend.http.bodies import error_response, internal_error
from kvmesh.frontend.http.error_shape import shape_for

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CALLER = "kvmesh.caller"
CLIENT_CLOSED = 499  # status counted for requests whose client leaves before the response


class Caller:
    """The authenticated sender of a request; `account` is None if no keys are configured.

    `tenant` is the tag of its namespace, `started` the arrival on the loop's clock. `model` is a
    metric label: handlers set it once the model is known to be served.
    """

    def __init__(self, authenticator: Authenticator, http: web.Request, now: float) -> None:
        self._authenticator = authenticator
        self._headers = http.headers
        self.account: Account | None = authenticator.account(http.headers)
        self.tenant = authenticator.tenant(http.headers)
        self.started = now
        self.model = ""
        self._entry: AccountEntry | None = None

    @property
    def owner(self) -> str:
        """Key of the caller in fair queues."""
        return self.account.key.sha256 if self.account is not None else ""

    def enter(self) -> None:
        """Count the request on the account; raises ApiError (429) at a limit."""
        if self.account is not None:
            self._entry = self.account.enter(self.started)

    def bind(self, request: GenerateRequest, body_bytes: int) -> None:
        """Bind the parsed request to this caller; raises ApiError (403, 429)."""
        request.body_bytes = body_bytes
        self._authenticator.bind(request, self.account)
        if self._entry is not None:
            sequences = max(len(request.prompts), 1) * request.n
            self._entry.add_sequences(sequences, asyncio.get_running_loop().time())

    def leave(self) -> None:
        if self._entry is not None:
            self._entry.leave()

    def require_scope(self, scope: Scope) -> None:
        """Raises ApiError (403) if the caller lacks the scope."""
        self._authenticator.require_scope(self._headers, scope)


def caller_of(http: web.Request) -> Caller:
    """The caller of an admitted request."""
    found: Caller = http[CALLER]
    return found


class RequestMiddleware:
    """Admits requests up to `max_in_flight`, and turns errors of handlers into responses.

    Routes in `unrestricted` need no key and do not count.
    """

    def __init__(
        self, authenticator: Authenticator, max_in_flight: int, unrestricted: frozenset[str]
    ) -> None:
        self._authenticator = authenticator
        self._max_in_flight = max_in_flight
        self._unrestricted = unrestricted
        self._in_flight = 0

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical in self._unrestricted:
            return await _respond(request, handler)
        status = CLIENT_CLOSED
        self._in_flight += 1
        try:
            response = await _respond(request, lambda http: self._admit(http, handler))
            status = response.status
            return response
        finally:
            self._in_flight -= 1
            caller: Caller | None = request.get(CALLER)
            model = caller.model if caller is not None else ""
            metrics.requests.labels(request.match_info.route.name or "other", model, status).inc()

    async def _admit(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        if self._in_flight > self._max_in_flight:
            raise Overloaded("The server is at its limit of concurrent requests.")
        self._authenticator.check_origin(http.method, http.headers)
        now = asyncio.get_running_loop().time()
        caller = http[CALLER] = Caller(self._authenticator, http, now)
        caller.enter()
        try:
            return await handler(http)
        finally:
            caller.leave()


async def _respond(http: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's response, or its error in the client's shape."""
    try:
        return await handler(http)
    except ApiError as error:
        return error_response(shape_for(http), error)
    except (ConnectionError, web.HTTPException):
        raise
    except Exception as error:
        return error_response(shape_for(http), internal_error(error))
