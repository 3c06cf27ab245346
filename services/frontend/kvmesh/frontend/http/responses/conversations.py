"""Stored conversations: one record each in the bucket of responses, written anew by each change.

So a conversation is kept as a whole for the bucket's TTL after its last change, whatever becomes of
the responses that added to it. A small head names the present version, and a change replaces it
only if nobody else has: frontends that add at the same time lose nothing.
"""

import asyncio
import random
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zstandard

from kvmesh.bus.errors import BusError, Conflict, NotFound
from kvmesh.frontend.apis.responses.conversations import CONVERSATION_PREFIX, Conversation
from kvmesh.frontend.auth.bucket_quota import owner_of
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.http.responses.store import MAX_TURN, SMALL, TIMEOUT_S, ResponseStore

TRIES = 16  # of a change beside those of others
FIRST_WAIT_S, MAX_WAIT_S = 0.02, 1.0  # between two of them, at most
MAX_ID = 128
HEAD = "head"
_decoder = msgspec.json.Decoder(Conversation)


class ConversationNotFound(ApiError):
    """The conversation does not exist, has expired, or belongs to another tenant."""

    def __init__(self, name: str, param: str | None = None) -> None:
        reason = f"Conversation with id '{name}' not found."
        super().__init__("not_found", reason, param=param)


class _Version(NamedTuple):
    """A conversation as it is stored under `entry`, which the head of that `revision` names."""

    conversation: Conversation
    entry: str
    revision: int


class ConversationStore:
    """Reads and changes conversations; raises ConversationNotFound, InvalidRequest, Unavailable."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, name: str, tenant: str, param: str | None = None) -> Conversation:
        """A conversation; `param` names the field of a body that holds its id, for errors."""
        return (await self._get(name, tenant, param)).conversation

    async def create(self, conversation: Conversation) -> None:
        """Store a new conversation."""
        entry = await self._write(conversation)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = _head(conversation.id, conversation.tenant)
                await self._store.bucket.create(head, entry.encode())
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Cannot store conversations: {error}") from error

    async def change(
        self, name: str, tenant: str, edit: Callable[[Conversation], None]
    ) -> Conversation:
        """Change a conversation, which `edit` gets again if another one changed it meanwhile."""
        for attempt in range(TRIES):
            conversation, before, revision = await self._get(name, tenant, None)
            edit(conversation)
            entry = await self._write(conversation)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    head = _head(name, tenant)
                    await self._store.bucket.update(head, entry.encode(), last=revision)
            except Conflict:
                await self._remove(entry)
                await asyncio.sleep(random.random() * min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S))
                continue
            except (BusError, TimeoutError) as error:
                raise Unavailable(f"Cannot change conversations: {error}") from error
            await self._remove(before)
            return conversation
        raise Unavailable(f"Conversation '{name}' is being changed by too many requests.")

    async def delete(self, name: str, tenant: str) -> None:
        """Delete a conversation with its items."""
        entry = (await self._get(name, tenant, None)).entry
        await self._remove(_head(name, tenant).removesuffix(f".{HEAD}"))
        await self._remove(entry)

    async def _get(self, name: str, tenant: str, param: str | None) -> _Version:
        if not _is_id(name):
            raise ConversationNotFound(name, param)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._read(name, tenant)
        except NotFound:
            raise ConversationNotFound(name, param) from None
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Cannot read conversations: {error}") from error

    async def _read(self, name: str, tenant: str) -> _Version:
        """The present version; raises NotFound, also if it is replaced again and again."""
        for last in range(TRIES, 0, -1):
            head = await self._store.bucket.get(_head(name, tenant))
            entry = (head.value or b"").decode()
            try:
                packed = await self._store.read(entry)
            except NotFound:
                if last == 1:
                    raise
                continue
            small = 0 <= zstandard.frame_content_size(packed) < SMALL
            found = _unpacked(packed) if small else await asyncio.to_thread(_unpacked, packed)
            if found.tenant == tenant:
                return _Version(found, entry, head.revision or 0)
            break
        raise NotFound(name)

    async def _write(self, conversation: Conversation) -> str:
        """Store a version; returns its entry."""
        size = sum(map(len, conversation.items))
        if size > MAX_TURN:
            raise InvalidRequest(f"A conversation has at most {MAX_TURN} bytes.", "items")
        small = size < SMALL
        packed = _packed(conversation) if small else await asyncio.to_thread(_packed, conversation)
        version = f"{conversation.id}-{secrets.token_hex(8)}"
        entry = f"{owner_of(conversation.tenant)}.{version}"
        try:
            await self._store.write(entry, packed)
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Cannot store conversations: {error}") from error
        return entry

    async def _remove(self, entry: str) -> None:
        """Remove what nobody needs any more; if that fails, it expires."""
        with suppress(BusError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._store.remove(entry)


def _packed(conversation: Conversation) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(msgspec.json.encode(conversation))


def _unpacked(packed: bytes) -> Conversation:
    return _decoder.decode(zstandard.ZstdDecompressor().decompress(packed))


def _head(name: str, tenant: str) -> str:
    return f"{owner_of(tenant)}.{name}.{HEAD}"


def _is_id(text: str) -> bool:
    shaped = text.startswith(CONVERSATION_PREFIX) and text.isascii()
    return shaped and text.replace("_", "").isalnum() and len(text) <= MAX_ID
