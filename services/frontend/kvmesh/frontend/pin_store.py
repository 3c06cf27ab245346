"""The pins that hold now, in a bucket that all frontends share, and each tenant has a share of."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import APIError, KeyDeletedError, KeyNotFoundError
from nats.js.kv import KeyValue

from kvmesh.bus.buckets import bucket_sizes, read_bucket
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import cause
from kvmesh.frontend.errors import Unavailable
from kvmesh.frontend.quota import named, owner_of

TTL_S = 86400.0
MAX_BYTES = 256 << 20
OWNER_BYTES = MAX_BYTES // 8
OWNER_PINS = 1000
TIMEOUT_S = 5.0


class KeptPin(Struct, frozen=True):
    """A pin of a tenant: the prefix as packed sequence hashes. Times are Unix seconds."""

    id: str
    tenant: str
    model: str
    tokens: int
    sequence: bytes
    priority: int
    created: float
    expires: float


_decoder = msgspec.msgpack.Decoder(KeptPin)
_encode = msgspec.msgpack.Encoder().encode


class PinStore:
    """Reads and writes pins; the bucket is made on first use. Raises Unavailable."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._config = KeyValueConfig(
            bucket=bus.subjects.pins_bucket,
            ttl=TTL_S,
            max_bytes=MAX_BYTES,
            storage=StorageType.FILE,
            replicas=bus.options.replicas,
        )
        self._bucket: KeyValue | None = None

    async def put(self, pin: KeptPin) -> None:
        async with self._open() as bucket:
            await bucket.put(_key(pin.tenant, pin.id), _encode(pin))

    async def get(self, tenant: str, pin: str, now: float) -> KeptPin | None:
        """None if there is no such pin, or no longer."""
        async with self._open() as bucket:
            try:
                found = _decoder.decode((await bucket.get(_key(tenant, pin))).value or b"")
            except (KeyNotFoundError, KeyDeletedError):
                return None
            return found if found.expires > now else None

    async def has_room(self, tenant: str, size: int, now: float) -> bool:
        """Whether the owner of a tenant may have one more pin, of so many bytes."""
        owner = owner_of(tenant)
        async with self._open():
            held = await bucket_sizes(self._bus, self._config.bucket, f"{owner}.>")
        if _fits(held.values(), size):
            return True
        ended = [pin for pin in await self._all_of(f"{owner}.>") if pin.expires <= now]
        for pin in ended:
            await self.delete(pin)
            held.pop(_key(pin.tenant, pin.id), None)
        return _fits(held.values(), size)

    async def delete(self, pin: KeptPin) -> None:
        async with self._open() as bucket:
            await bucket.delete(_key(pin.tenant, pin.id))

    async def of(self, tenant: str, now: float) -> list[KeptPin]:
        """A tenant's pins, oldest first."""
        return await self._read(f"{owner_of(tenant)}.{named(tenant)}.*", now)

    async def all(self, now: float) -> list[KeptPin]:
        return await self._read(">", now)

    async def _read(self, keys: str, now: float) -> list[KeptPin]:
        alive = [pin for pin in await self._all_of(keys) if pin.expires > now]
        return sorted(alive, key=lambda pin: pin.created)

    async def _all_of(self, keys: str) -> list[KeptPin]:
        """Those that have ended are among them."""
        async with self._open():
            found = await read_bucket(self._bus, self._config.bucket, keys)
        return [_decoder.decode(value) for value in found.values()]

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[KeyValue]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._bucket is None:
                    self._bucket = await self._bus.js.create_key_value(self._config)
                yield self._bucket
        except (NatsError, APIError, TimeoutError) as error:
            raise Unavailable(f"Pins cannot be read or changed: {cause(error)}") from error


def _fits(held: Collection[int], size: int) -> bool:
    return len(held) < OWNER_PINS and sum(held) + size <= OWNER_BYTES


def _key(tenant: str, pin: str) -> str:
    return f"{owner_of(tenant)}.{named(tenant)}.{named(pin)}"
