"""Endpoints of stored responses: read one, list its input, delete it."""

from aiohttp import web

from kvmesh.frontend.apis.base import decode_query, json_encode
from kvmesh.frontend.apis.responses.input_items import ItemsQuery, input_of, item_list
from kvmesh.frontend.apis.responses.references import referenced_responses, resolve
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.http.responses.store import ResponseStore

PATH = "/v1/responses/{id}"


class StoredResponseEndpoints:
    """Makes the handlers of /v1/responses/{id}."""

    def __init__(
        self, endpoints: EndpointFactory, store: ResponseStore, threads: FairThreads
    ) -> None:
        self._endpoints = endpoints
        self._store = store
        self._threads = threads

    @property
    def routes(self) -> list[web.RouteDef]:
        handler = self._endpoints.without_body
        return [
            web.get(PATH, handler(self._get), name="stored"),
            web.delete(PATH, handler(self._delete), name="stored-delete"),
            web.get(f"{PATH}/input_items", handler(self._input), name="stored-input"),
        ]

    async def _get(self, call: EndpointCall[None]) -> bytes:
        if call.http.query.get("stream", "false") != "false":
            raise InvalidRequest("`stream`: a stored response is not streamed.", "stream")
        return bytes((await self._store.get(call.path_id, call.caller.tenant)).response)

    async def _delete(self, call: EndpointCall[None]) -> bytes:
        await self._store.delete(call.path_id, call.caller.tenant)
        return json_encode({"id": call.path_id, "object": "response", "deleted": True})

    async def _input(self, call: EndpointCall[None]) -> bytes:
        query, caller = decode_query(call.http.query, ItemsQuery), call.caller
        turns = await self._store.history(call.path_id, caller.tenant, None)
        items = [item for turn in turns for item in (*turn.input, *turn.output)]
        found = await self._store.items(referenced_responses(items), caller.tenant)
        size = sum(map(len, items)) + sum(len(item) for held in found.values() for item in held)

        def listed() -> bytes:
            return json_encode(item_list(resolve(input_of(turns), found, None), query))

        return listed() if size < LARGE else await self._threads.call(caller.owner, listed)
