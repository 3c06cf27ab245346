"""Endpoints beside those that generate: who may enter, and errors in the OpenAI shape."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from kvmesh.frontend.bodies import JSON, read_body, refuse, unexpected
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.gate import Gate
from kvmesh.frontend.generation import Handler, entered
from kvmesh.frontend.limits import Account, Scope
from kvmesh.frontend.surfaces import openai
from kvmesh.frontend.surfaces.base import Headers, decode, json_encode
from kvmesh.settings.schema import Frontend as FrontendSettings

T = TypeVar("T")


class Visit(Struct, frozen=True):
    """One call of an endpoint: by whom, with what. `tenant` is the namespace of its caches."""

    account: Account | None
    tenant: str
    headers: Headers
    id: str
    body: bytes

    def decoded(self, decoder: "msgspec.json.Decoder[T]") -> T:
        """Raises InvalidRequest that names the field at fault."""
        return decode(decoder, self.body)


Action = Callable[[Visit], Awaitable[dict[str, Any]]]


class Doors:
    """Makes handlers for those who hold a scope."""

    def __init__(self, gate: Gate, settings: FrontendSettings) -> None:
        self._gate = gate
        self._settings = settings

    def handler(self, scope: Scope, action: Action) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                account = self._gate.permit(http.headers, scope)
                with entered(account, asyncio.get_running_loop().time()):
                    body = await read_body(http, self._settings)
                    tenant = self._gate.tenant(http.headers)
                    place = http.match_info.get("id", "")
                    answer = await action(Visit(account, tenant, http.headers, place, body))
                return web.Response(body=json_encode(answer), content_type=JSON)
            except ApiError as error:
                return refuse(openai.SHAPE, error)
            except ConnectionError:
                raise
            except Exception as error:
                return refuse(openai.SHAPE, unexpected(error))

        return handle
