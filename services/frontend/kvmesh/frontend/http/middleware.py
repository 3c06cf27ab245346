"""Middleware of every route: admission, authentication, account limits, errors, request counts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial

from aiohttp import hdrs, web

from kvmesh.bus.promptness import Promptness
from kvmesh.frontend import metrics
from kvmesh.frontend.auth.accounts import Account, AccountEntry, Scope
from kvmesh.frontend.auth.admission import Admission
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.batches.forms import LineResult
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.active_request import ActiveRequest
from kvmesh.frontend.http import request_id
from kvmesh.frontend.http.access_log import CLIENT_CLOSED, MAX_SHOWN, AccessEntry, now
from kvmesh.frontend.http.bodies import error_response, internal_error
from kvmesh.frontend.http.error_shape import shape_for
from kvmesh.frontend.http.intake.cors import CrossOrigin
from kvmesh.frontend.pooling.run import PoolingRun
from kvmesh.frontend.tenant_figures import TenantUse
from kvmesh.tracing.span import NO_SPAN, TraceSpan
from kvmesh.tracing.tracer import logged_as

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
UPLOAD = "file-upload"  # the route that takes a form
LINE_METHOD = "BATCH"  # of the requests of batches, in logs
SPAN = web.RequestKey("span", TraceSpan)


class Caller:
    """The authenticated sender of a request; `account` is None if no keys are configured.

    `tenant` is the tag of its namespace, `started` the arrival on the loop's clock. `model` is a
    metric label: handlers set it once the model is known to be served. `request` is what it asks
    for once it is parsed, `shadows` are copies of it for other models, and `active` is the same
    once it runs. `failed` is set if an error ended the response after its head. `on_placed` is
    called once workers have a request that is not streamed.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        headers: Mapping[str, str],
        account: Account | None,
        now: float,
    ) -> None:
        self._authenticator = authenticator
        self._headers = headers
        self.request: GenerateRequest | None = None
        self.active: ActiveRequest | PoolingRun | None = None
        self.account = account
        self.tenant = authenticator.tenant(headers, account)
        self.started = now
        self.model = ""
        self.failed = False
        self._entry: AccountEntry | None = None
        self.shadows: list[GenerateRequest] = []
        self.on_placed: Callable[[], None] | None = None
        self.outlived: asyncio.Future[Callable[[], None]] | None = None

    @property
    def key_tenant(self) -> str | None:
        """Name of the tenant of the caller's key."""
        return self.account.key.tenant if self.account is not None else None

    @property
    def owner(self) -> str:
        """Key of the caller in fair queues."""
        return self.account.key.sha256 if self.account is not None else ""

    @property
    def fair_class(self) -> str:
        """Key of the caller in the admission of this frontend."""
        key = self.account.key if self.account is not None else None
        return "" if key is None else key.fair_class or key.tenant or key.sha256

    def enter(self) -> None:
        """Count the request on the account; raises ApiError (429) at a limit."""
        if self.account is not None:
            self._entry = self.account.enter(self.started)

    def bind(self, request: GenerateRequest, body_bytes: int, light: bool) -> None:
        """Bind the parsed request to this caller; raises ApiError (403, 429)."""
        self.request, request.light = request, light
        request.body_bytes += body_bytes
        request.client_id = request_id.client_id(self._headers)
        self._authenticator.bind(request, self.account)
        if self._entry is not None:
            sequences = max(len(request.prompts), 1) * request.n
            self._entry.add_sequences(sequences, asyncio.get_running_loop().time())

    def leave(self) -> None:
        if self._entry is not None:
            self._entry.leave()

    def outlive(self) -> Callable[[], None]:
        """Have the request count until the returned function is called, not until its response."""
        future = self.outlived = asyncio.get_running_loop().create_future()

        def leave() -> None:
            future.add_done_callback(lambda done: done.result()())

        return leave

    def require_scope(self, scope: Scope) -> None:
        """Raises ApiError (403) if the caller lacks the scope."""
        self._authenticator.require_scope(self._headers, scope)


_requests = lru_cache(maxsize=1024)(metrics.requests.labels)
CALLER = web.RequestKey("caller", Caller)


def caller_of(http: web.Request) -> Caller:
    """The caller of an admitted request."""
    return http[CALLER]


class RequestMiddleware:
    """Admits requests by the shares of tenants, and turns errors of handlers into responses.

    Paths in `unrestricted` need no key and do not count. `id_prefixes` are those of request ids by
    the name of the route. `access_log` gets every request that counts, except of `/metrics`.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        admission: Admission,
        promptness: Promptness,
        unrestricted: frozenset[str],
        id_prefixes: Mapping[str, str],
        access_log: Callable[[AccessEntry], None] | None,
        cross_origin: CrossOrigin | None,
    ) -> None:
        self._authenticator = authenticator
        self._admission = admission
        self._promptness = promptness
        self._unrestricted = unrestricted
        self._id_prefixes = id_prefixes
        self._access_log = access_log
        self._cross_origin = cross_origin

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.match_info.route
        prefix = self._id_prefixes.get(route.name or "", request_id.PREFIX)
        request_id.assign(request, prefix)
        if self._cross_origin is not None:
            preflight = self._cross_origin.preflight(request)
            if preflight is not None:
                return preflight
        if request.path in self._unrestricted:
            try:
                return await handler(request)
            except Exception as error:
                return _failure(request, error)
        # all in this coroutine: a long answer holds the frame of each one on its way
        status, share = CLIENT_CLOSED, None
        began = asyncio.get_running_loop().time()
        try:
            try:
                share = self._admit(request)
                response = await handler(request)
            except Exception as error:
                response = _failure(request, error)
            status = response.status
            return response
        finally:
            caller = request.get(CALLER)
            if caller is not None and share is not None:
                self._end(caller, share)
            _count(route.name or "other", caller, status)
            if self._access_log is not None and route.name != "metrics":
                self._access_log(_entry(request, caller, status, began))
            if caller is not None:
                caller.active = None  # else a cycle: it has the response, which has the request

    def note_line(self, path: str, api: str, caller: Caller, result: LineResult) -> None:
        """Count and log a request of a batch that has ended."""
        _count(api, caller, result.status)
        if self._access_log is not None:
            total = round(asyncio.get_running_loop().time() - caller.started, 6)
            entry = AccessEntry(
                time=now(),
                id=result.request_id,
                method=LINE_METHOD,
                path=path,
                api=api,
                status=result.status,
                total=total,
            )
            _describe(entry, caller)
            self._access_log(entry)
        caller.active = None

    def _admit(self, http: web.Request) -> str | None:
        """Count a request from now on; its share, None if it has none. Raises ApiError."""
        pages = self._cross_origin
        allowed = pages is not None and pages.allows(http.headers.get(hdrs.ORIGIN))
        uploads = http.match_info.route.name == UPLOAD
        self._authenticator.check_origin(http.method, http.headers, allowed, uploads)
        now = asyncio.get_running_loop().time()
        account = self._authenticator.account(http.headers)
        caller = http[CALLER] = Caller(self._authenticator, http.headers, account, now)
        if http.method == hdrs.METH_GET and http.match_info.route.name in self._id_prefixes:
            return None  # opens a WebSocket: its requests are admitted
        share = caller.fair_class  # that of now: its key may change while the request runs
        self._admission.enter(share, self._promptness.behind_s)
        try:
            caller.enter()
        except ApiError:
            self._admission.leave(share)
            raise
        return share

    def _end(self, caller: Caller, share: str) -> None:
        """The response has ended, but not always what goes on for it."""
        if caller.outlived is None:
            self._leave(caller, share)
        else:
            caller.outlived.set_result(partial(self._leave, caller, share))

    def _leave(self, caller: Caller, share: str) -> None:
        caller.leave()
        self._admission.leave(share)


def _failure(http: web.Request, error: Exception) -> web.Response:
    """The response to an error of a handler, in the client's shape.

    Raises the error if it is one of the connection, or a response of aiohttp.
    """
    if isinstance(error, web.HTTPNotFound):  # the target is no path, as that of `OPTIONS *`
        reason = f"{http.method} {http.raw_path[:MAX_SHOWN]} does not exist; see /docs."
        error = ApiError("not_found", reason, code="unknown_url")
    elif isinstance(error, ConnectionError | web.HTTPException):
        raise error
    own = request_id.id_of(http)
    with logged_as(http.get(SPAN, NO_SPAN)):
        known = error if isinstance(error, ApiError) else internal_error(error, own)
        return error_response(shape_for(http), known, own)


def _entry(http: web.Request, caller: Caller | None, status: int, began: float) -> AccessEntry:
    entry = AccessEntry(
        time=now(),
        id=request_id.id_of(http),
        client=request_id.client_id(http.headers),
        method=http.method,
        path=http.rel_url.raw_path[:MAX_SHOWN],
        api=http.match_info.route.name or "other",
        status=status,
        total=round(asyncio.get_running_loop().time() - began, 6),
    )
    if caller is not None:
        _describe(entry, caller)
    return entry


def _describe(entry: AccessEntry, caller: Caller) -> None:
    if caller.request is not None:
        entry.describe(caller.request)
    elif caller.account is not None:
        entry.key, entry.tenant = caller.account.key.name, caller.account.key.tenant or ""
    if caller.active is not None:
        entry.add_answer(caller.active)


def _count(api: str, caller: Caller | None, status: int) -> None:
    """Count a request that has ended."""
    _requests(api, caller.model if caller is not None else "", status).inc()
    if caller is not None:
        failed = caller.failed or (status >= 400 and status != CLIENT_CLOSED)
        use, ended = TenantUse(1, int(failed)), asyncio.get_running_loop().time()
        metrics.tenants.add(caller.key_tenant, caller.model, use, ended)
