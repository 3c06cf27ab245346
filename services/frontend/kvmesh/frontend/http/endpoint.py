"""Endpoints beside those that generate, for those who hold a scope."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from kvmesh.frontend.apis.base import Headers, decode, json_encode
from kvmesh.frontend.auth.accounts import Account, Scope
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import JSON, checked, read_body
from kvmesh.frontend.http.middleware import Handler, caller_of
from kvmesh.settings.schema import FrontendSettings

T = TypeVar("T")


class EndpointCall(Struct, frozen=True):
    """One call of an endpoint: by whom, with what. `tenant` is the namespace of its caches."""

    account: Account | None
    tenant: str
    headers: Headers
    id: str
    body: bytes

    def decoded(self, decoder: "msgspec.json.Decoder[T]") -> T:
        """Raises InvalidRequest that names the field at fault."""
        return decode(decoder, self.body)


Action = Callable[[EndpointCall], Awaitable[dict[str, Any]]]


class ScopedEndpoints:
    """Makes handlers for those who hold a scope."""

    def __init__(self, settings: FrontendSettings, threads: FairThreads) -> None:
        self._settings = settings
        self._threads = threads

    def handler(self, scope: Scope, action: Action) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            caller = caller_of(http)
            caller.may(scope)
            body = await read_body(http, self._settings)
            await checked(self._threads, caller.owner, body)
            place = http.match_info.get("id", "")
            visit = EndpointCall(caller.account, caller.tenant, http.headers, place, body)
            return web.Response(body=json_encode(await action(visit)), content_type=JSON)

        return handle
