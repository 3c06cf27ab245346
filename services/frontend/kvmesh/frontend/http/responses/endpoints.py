"""Endpoints of stored responses: read one, list its input, delete it."""

import msgspec
from aiohttp import web

from kvmesh.frontend.apis.responses.references import referenced_responses, resolve
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.http.responses.store import ResponseStore

PATH = "/v1/responses/{id}"


class StoredResponseEndpoints:
    """Makes the handlers of /v1/responses/{id}."""

    def __init__(self, endpoints: EndpointFactory, store: ResponseStore) -> None:
        self._endpoints = endpoints
        self._store = store

    @property
    def routes(self) -> list[web.RouteDef]:
        handler = self._endpoints.without_body
        return [
            web.get(PATH, handler(self._get), name="stored"),
            web.delete(PATH, handler(self._delete), name="stored-delete"),
            web.get(f"{PATH}/input_items", handler(self._input), name="stored-input"),
        ]

    async def _get(self, call: EndpointCall[None]) -> bytes:
        return bytes((await self._store.get(call.path_id, call.caller.tenant)).response)

    async def _delete(self, call: EndpointCall[None]) -> bytes:
        await self._store.delete(call.path_id, call.caller.tenant)
        return msgspec.json.encode({"id": call.path_id, "object": "response", "deleted": True})

    async def _input(self, call: EndpointCall[None]) -> bytes:
        turns = await self._store.history(call.path_id, call.caller.tenant)
        earlier = [item for turn in turns[:-1] for item in (*turn.input, *turn.output)]
        items = [*earlier, *turns[-1].input]
        outputs = await self._store.outputs(referenced_responses(items), call.caller.tenant)
        items = resolve(items, outputs, None)
        return msgspec.json.encode({"object": "list", "data": items, "has_more": False})
