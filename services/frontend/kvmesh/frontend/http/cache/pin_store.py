"""Store of the valid pins, in a bucket that all frontends share."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b

import msgspec
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, MessageTooLarge, NotFound, cause
from kvmesh.bus.messages import MessageDecoder
from kvmesh.bus.storage.buckets import expiring_bucket, read_bucket, read_headers
from kvmesh.frontend.errors import ApiError, Unavailable

TTL_S = 86400.0
MAX_BYTES = 256 << 20
TIMEOUT_S = 5.0
HEAD = "Kvmesh-Pin"


class PinHead(Struct, frozen=True):
    """A pin without its hashes; stored in a message header, so that lists read only that."""

    id: str
    model: str
    tokens: int
    priority: int
    created: float
    expires: float
    bytes: int


class StoredPin(Struct, frozen=True):
    """A pin of a tenant. Times are Unix seconds."""

    id: str
    tenant: str
    model: str
    tokens: int
    sequence_hashes: bytes
    priority: int
    created: float
    expires: float

    @property
    def head(self) -> PinHead:
        size = len(self.sequence_hashes)
        facts = self.tokens, self.priority, self.created, self.expires, size
        return PinHead(self.id, self.model, *facts)


_decoder = MessageDecoder(StoredPin)
_heads = msgspec.json.Decoder(PinHead)
_encode = msgspec.msgpack.Encoder().encode


class PinStore:
    """Reads and writes pins. Raises Unavailable."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._name = bus.subjects.pins_bucket
        self._bucket = expiring_bucket(bus, self._name, TTL_S, MAX_BYTES)

    async def put(self, pin: StoredPin) -> None:
        subject = f"$KV.{self._name}.{_key(pin.tenant, pin.id)}"
        head = json.dumps(msgspec.to_builtins(pin.head))  # headers must be ASCII
        async with self._access():
            await self._bus.store(subject, _encode(pin), TIMEOUT_S, {HEAD: head})

    async def get(self, tenant: str, pin: str, now: float) -> StoredPin | None:
        """The pin of this id; None if it does not exist or has expired."""
        async with self._access():
            try:
                found = _decoder.decode((await self._bucket.get(_key(tenant, pin))).value or b"")
            except NotFound:
                return None
            return found if found.expires > now else None

    async def delete(self, pin: StoredPin) -> None:
        async with self._access():
            await self._bucket.delete(_key(pin.tenant, pin.id))

    async def list_tenant(self, tenant: str, now: float) -> list[PinHead]:
        """A tenant's pins, oldest first."""
        heads = await self._heads(f"{_tokens(tenant)}.*", now)
        return sorted(heads, key=lambda head: head.created)

    async def list_owner(self, owner: str, now: float) -> list[PinHead]:
        """Pins of all parts of an owner, in the order in which they were stored."""
        return await self._heads(f"{_token(owner)}.>", now)

    async def list_all(self, now: float) -> list[StoredPin]:
        async with self._access():
            found = await read_bucket(self._bus, self._bus.subjects.pins_bucket)
        pins = [_decoder.decode(value) for value in found.values()]
        return [pin for pin in pins if pin.expires > now]

    async def _heads(self, keys: str, now: float) -> list[PinHead]:
        async with self._access():
            found = await read_headers(self._bus, self._bus.subjects.pins_bucket, keys)
        heads = [_heads.decode(headers[HEAD]) for headers in found.values() if HEAD in headers]
        return [head for head in heads if head.expires > now]

    @asynccontextmanager
    async def _access(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield
        except MessageTooLarge as error:
            reason = f"The pin has {error.size} bytes and exceeds {error.limit}."
            raise ApiError("too_large", reason) from error
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Cannot access pins: {cause(error)}") from error


def _key(tenant: str, pin: str) -> str:
    return f"{_tokens(tenant)}.{blake2b(pin.encode(), digest_size=16).hexdigest()}"


def _tokens(tenant: str) -> str:
    """A tenant's owner and part as two tokens of a key."""
    whole, _, part = tenant.partition("/")
    return f"{_token(whole)}.{_token(part)}"


def _token(tag: str) -> str:
    return tag or "none"
