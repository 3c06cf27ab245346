"""Endpoints of stored responses: read one, list its input, delete it."""

from collections.abc import Callable

from aiohttp import web

from kvmesh.frontend.apis.base import decode_query, json_encode
from kvmesh.frontend.apis.responses.input_items import ItemsQuery, StoredQuery, input_of, item_list
from kvmesh.frontend.apis.responses.references import referenced_responses, resolve
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.http.middleware import Caller
from kvmesh.frontend.http.responses.background import BackgroundResponses, Resume, starting_after
from kvmesh.frontend.http.responses.store import ResponseNotFound, ResponseStore

PATH = "/v1/responses/{id}"


class ResponseQuery(StoredQuery):
    stream: bool = False


class StoredResponseEndpoints:
    """Makes the handlers of /v1/responses/{id}."""

    def __init__(
        self,
        endpoints: EndpointFactory,
        store: ResponseStore,
        threads: FairThreads,
        background: BackgroundResponses,
        resumer: Callable[[Caller], Resume],
    ) -> None:
        self._background = background
        self._resumer = resumer
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
            web.post(f"{PATH}/cancel", handler(self._cancel), name="stored-cancel"),
        ]

    async def _get(self, call: EndpointCall[None]) -> web.StreamResponse | bytes:
        tenant, resume = call.caller.tenant, self._resumer(call.caller)
        if decode_query(call.http.query, ResponseQuery).stream:
            after = starting_after(call.http)
            try:
                return await self._background.follow(call.http, call.path_id, tenant, after, resume)
            except ResponseNotFound:
                await self._store.get(call.path_id, tenant)
                reason = "`stream`: only responses of the background are streamed again."
                raise InvalidRequest(reason, "stream") from None
        try:
            return bytes((await self._store.get(call.path_id, tenant)).response)
        except ResponseNotFound:
            return await self._background.response(call.path_id, tenant, resume)

    async def _cancel(self, call: EndpointCall[None]) -> bytes:
        try:
            return await self._background.cancel(call.path_id, call.caller.tenant)
        except ResponseNotFound:
            await self._store.get(call.path_id, call.caller.tenant)
            raise InvalidRequest("Only responses of the background can be cancelled.") from None

    async def _delete(self, call: EndpointCall[None]) -> bytes:
        try:
            await self._background.delete(call.path_id, call.caller.tenant)
        except ResponseNotFound:
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
