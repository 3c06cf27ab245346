"""Endpoints of conversations: the conversation itself, and its items."""

from collections.abc import Callable
from typing import Any

from aiohttp import web
from msgspec import Raw

from kvmesh.frontend.apis.base import RequestStamp, decode_query, json_encode
from kvmesh.frontend.apis.responses.conversations import (
    CONVERSATION_PREFIX,
    Conversation,
    ConversationBody,
    ConversationItems,
    ConversationUpdate,
    listed_items,
    parse_conversation,
    parse_items,
    parse_update,
)
from kvmesh.frontend.apis.responses.input_items import (
    MAX_LISTED,
    ItemsQuery,
    StoredQuery,
    item_list,
)
from kvmesh.frontend.apis.responses.references import referenced_responses, resolve
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.http.request_id import stamp_of
from kvmesh.frontend.http.responses.conversations import ConversationStore
from kvmesh.frontend.http.responses.store import ResponseStore

PATH = "/v1/conversations"
ONE, ITEMS, ITEM = f"{PATH}/{{id}}", f"{PATH}/{{id}}/items", f"{PATH}/{{id}}/items/{{item}}"


class ConversationEndpoints:
    """Makes the handlers of /v1/conversations."""

    def __init__(
        self, endpoints: EndpointFactory, store: ResponseStore, threads: FairThreads
    ) -> None:
        self._endpoints = endpoints
        self._responses = store
        self._store = ConversationStore(store)
        self._threads = threads

    @property
    def routes(self) -> list[web.RouteDef]:
        plain, parsed = self._endpoints.without_body, self._endpoints.with_body
        create = parsed(lambda body, *_: parse_conversation(body), self._create)
        update = parsed(lambda body, *_: parse_update(body), self._update)
        add = parsed(lambda body, *_: parse_items(body), self._add)
        return [
            web.post(PATH, create, name="conversations"),
            web.get(ONE, plain(self._get), name="conversation"),
            web.post(ONE, update, name="conversation-update"),
            web.delete(ONE, plain(self._delete), name="conversation-delete"),
            web.post(ITEMS, add, name="conversation-items-add"),
            web.get(ITEMS, plain(self._items), name="conversation-items"),
            web.get(ITEM, plain(self._item), name="conversation-item"),
            web.delete(ITEM, plain(self._remove), name="conversation-item-delete"),
        ]

    async def _create(self, call: EndpointCall[ConversationBody]) -> dict[str, Any]:
        stamp, tenant = stamp_of(call.http), call.caller.tenant
        items = await self._listed(call, call.parsed.items or [], stamp)
        name, metadata = CONVERSATION_PREFIX + stamp.token, call.parsed.metadata or {}
        conversation = Conversation(name, stamp.created, metadata, tenant=tenant)
        conversation.add(items)
        await self._store.create(conversation)
        return conversation.object()

    async def _get(self, call: EndpointCall[None]) -> dict[str, Any]:
        return (await self._conversation(call)).object()

    async def _update(self, call: EndpointCall[ConversationUpdate]) -> dict[str, Any]:
        def replace(conversation: Conversation) -> None:
            conversation.metadata = call.parsed.metadata or {}

        return (await self._changed(call, replace)).object()

    async def _delete(self, call: EndpointCall[None]) -> dict[str, Any]:
        await self._store.delete(call.path_id, call.caller.tenant)
        return {"id": call.path_id, "object": "conversation.deleted", "deleted": True}

    async def _add(self, call: EndpointCall[ConversationItems]) -> dict[str, Any]:
        decode_query(call.http.query, StoredQuery)
        items = await self._listed(call, call.parsed.items, stamp_of(call.http))
        await self._changed(call, lambda conversation: conversation.add(items))
        return item_list(items, ItemsQuery(order="asc", limit=MAX_LISTED))

    async def _items(self, call: EndpointCall[None]) -> bytes:
        query = decode_query(call.http.query, ItemsQuery)
        items = (await self._conversation(call)).items

        def listed() -> bytes:
            return json_encode(item_list(items, query))

        light = sum(map(len, items)) < LARGE
        return listed() if light else await self._threads.call(call.caller.owner, listed)

    async def _item(self, call: EndpointCall[None]) -> bytes:
        decode_query(call.http.query, StoredQuery)
        found = (await self._conversation(call)).item(_item_name(call))
        if found is None:
            raise _not_found(call)
        return bytes(found)

    async def _remove(self, call: EndpointCall[None]) -> dict[str, Any]:
        def remove(conversation: Conversation) -> None:
            if conversation.item(_item_name(call)) is None:
                raise _not_found(call)
            conversation.remove(_item_name(call))

        return (await self._changed(call, remove)).object()

    async def _conversation(self, call: EndpointCall[Any]) -> Conversation:
        return await self._store.get(call.path_id, call.caller.tenant)

    async def _changed(
        self, call: EndpointCall[Any], edit: Callable[[Conversation], None]
    ) -> Conversation:
        return await self._store.change(call.path_id, call.caller.tenant, edit)

    async def _listed(
        self, call: EndpointCall[Any], items: list[Raw], stamp: RequestStamp
    ) -> list[Raw]:
        """Items to add, as they are listed; those of responses take the place of references."""
        referenced = referenced_responses(items)
        if referenced:
            outputs = await self._responses.items(referenced, call.caller.tenant)
            items = resolve(items, outputs, "items")
        return listed_items(items, stamp.token, "items")


def _item_name(call: EndpointCall[Any]) -> str:
    return call.http.match_info["item"]


def _not_found(call: EndpointCall[Any]) -> ApiError:
    return ApiError("not_found", f"Item with id '{_item_name(call)}' not found.")
