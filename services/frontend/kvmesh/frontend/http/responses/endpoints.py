"""Endpoints over stored responses: read, list input, delete."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from kvmesh.frontend.http.bodies import JSON
from kvmesh.frontend.http.middleware import Handler, caller_of
from kvmesh.frontend.http.responses.store import ResponseStore

Answer = Callable[[str, str], Awaitable[bytes]]


class StoredResponseEndpoints:
    """Makes the handlers of /v1/responses/{id}."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def handlers(self) -> list[web.RouteDef]:
        path = "/v1/responses/{id}"
        return [
            web.get(path, self._handler(self._get), name="stored"),
            web.delete(path, self._handler(self._delete), name="stored-delete"),
            web.get(f"{path}/input_items", self._handler(self._input), name="stored-input"),
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
            body = await answer(http.match_info["id"], caller_of(http).tenant)
            return web.Response(body=body, content_type=JSON)

        return handle
