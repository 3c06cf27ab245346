"""Endpoints over stored responses: read, list input, delete."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from kvmesh.frontend.bodies import JSON, refuse, unexpected
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation import Handler, Parts
from kvmesh.frontend.surfaces import openai

Answer = Callable[[str, str], Awaitable[bytes]]


class StoredResponses:
    """Makes the handlers of /v1/responses/{id}."""

    def __init__(self, parts: Parts) -> None:
        self._store = parts.responses
        self._gate = parts.gate

    def handlers(self) -> list[web.RouteDef]:
        path = "/v1/responses/{id}"
        return [
            web.get(path, self._handler(self._get)),
            web.delete(path, self._handler(self._delete)),
            web.get(f"{path}/input_items", self._handler(self._input)),
        ]

    async def _get(self, response_id: str, tenant: str) -> bytes:
        return bytes((await self._store.get(response_id, tenant)).response)

    async def _delete(self, response_id: str, tenant: str) -> bytes:
        await self._store.delete(response_id, tenant)
        return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})

    async def _input(self, response_id: str, tenant: str) -> bytes:
        turns = await self._store.history(response_id, tenant)
        earlier = [item for turn in turns[:-1] for item in (*turn.input, *turn.output)]
        items = [*earlier, *turns[-1].input]
        return msgspec.json.encode({"object": "list", "data": items, "has_more": False})

    def _handler(self, answer: Answer) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                tenant = self._gate.tenant(http.headers)
                body = await answer(http.match_info["id"], tenant)
                return web.Response(body=body, content_type=JSON)
            except ApiError as error:
                return refuse(openai.SHAPE, error)
            except Exception as error:
                return refuse(openai.SHAPE, unexpected(error))

        return handle
