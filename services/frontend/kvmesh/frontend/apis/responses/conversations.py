"""Conversations that the mesh keeps for clients: their bodies and their items. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis.base import StoredTurn, check_length, decode
from kvmesh.frontend.apis.openai import Metadata
from kvmesh.frontend.apis.responses.body import storable_items
from kvmesh.frontend.apis.responses.input_items import input_item
from kvmesh.frontend.apis.responses.items import RESPONSE_PREFIX
from kvmesh.frontend.apis.responses.references import head_of

CONVERSATION_PREFIX = "conv_"
MAX_ADDED = 20  # items of one request
_NOTHING = Raw(b"null")


class ConversationBody(Struct):
    """Body of a new conversation."""

    items: list[Raw] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct):
    """Body of a change, which replaces the metadata."""

    metadata: Metadata | None


class ConversationItems(Struct):
    """Body with items to add."""

    items: list[Raw]


_body = msgspec.json.Decoder(ConversationBody)
_update = msgspec.json.Decoder(ConversationUpdate)
_items = msgspec.json.Decoder(ConversationItems)


def parse_conversation(body: bytes) -> ConversationBody:
    """Decode the body of a new conversation, which may be empty; raises InvalidRequest."""
    parsed = decode(_body, body or b"{}")
    check_length(len(parsed.items or ()), 0, MAX_ADDED, "items")
    return parsed


def parse_update(body: bytes) -> ConversationUpdate:
    """Decode a change of a conversation; raises InvalidRequest."""
    return decode(_update, body)


def parse_items(body: bytes) -> ConversationItems:
    """Decode items to add; raises InvalidRequest."""
    parsed = decode(_items, body)
    check_length(len(parsed.items), 1, MAX_ADDED, "items")
    return parsed


class Conversation(Struct):
    """A stored conversation, whose items are in the form in which they are listed.

    `created_at` is in Unix seconds; only `tenant` may read it.
    """

    id: str
    created_at: int
    metadata: dict[str, str] = {}
    items: list[Raw] = []
    tenant: str = ""

    @property
    def turn(self) -> StoredTurn:
        """All items, as a turn that a response continues."""
        return StoredTurn(self.id, None, self.items, [], _NOTHING)

    def object(self) -> dict[str, Any]:
        """The conversation as clients see it."""
        head = {"id": self.id, "object": "conversation", "created_at": self.created_at}
        return {**head, "metadata": self.metadata}

    def add(self, items: Iterable[Raw]) -> None:
        """Add items at the end, but none twice: a response may be resumed, and so end twice."""
        known = {head_of(item).id for item in self.items}
        for item in items:
            if (name := head_of(item).id) not in known:
                known.add(name)
                self.items.append(item)

    def item(self, name: str) -> Raw | None:
        """The item with this id."""
        return next((item for item in self.items if head_of(item).id == name), None)

    def remove(self, name: str) -> None:
        """Remove the item with this id."""
        self.items = [item for item in self.items if head_of(item).id != name]


def listed_items(items: list[Raw], token: str, field: str) -> list[Raw]:
    """Items of a body's `field` as they are listed; those without ids get some from `token`.

    Leaves out what no prompt can hold. Raises InvalidRequest.
    """
    stored = storable_items(items, field)
    turn = StoredTurn(RESPONSE_PREFIX + token, None, stored, [], _NOTHING)
    return [input_item(turn, place) for place in range(len(stored))]
