"""Stored responses: each turn in a JetStream bucket with a TTL, cut to the server's message size.

A turn holds only what it added, and names the turn before it, so that a long conversation is
stored once. Every frontend of a mesh sees the same bucket.
"""

import asyncio
import logging

import msgspec
import zstandard
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import APIError, KeyDeletedError, KeyNotFoundError
from nats.js.kv import KeyValue

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import cause
from kvmesh.frontend.errors import ApiError, Unavailable
from kvmesh.frontend.surfaces.base import StoredTurn

log = logging.getLogger(__name__)
PART_BYTES = 512 << 10
MAX_TURNS = 1000
MAX_BYTES = 64 << 20
TIMEOUT_S = 5.0
MAX_ID = 128
_decoder = msgspec.json.Decoder(StoredTurn)


class ResponseNotFound(ApiError):
    """No such response, not any more, or not of this tenant."""

    def __init__(self, response_id: str, param: str | None = None) -> None:
        super().__init__("not_found", f"Response with id '{response_id}' not found.", param=param)
        self.response_id = response_id


class ResponseStore:
    """Reads and writes turns; a missing bucket is made on first use."""

    def __init__(self, bus: Bus, ttl_s: float, max_bytes: int) -> None:
        self._bus = bus
        self._config = KeyValueConfig(
            bucket=bus.subjects.responses_bucket,
            ttl=ttl_s,
            max_bytes=max_bytes,
            storage=StorageType.FILE,
            replicas=bus.options.replicas,
        )
        self._bucket: KeyValue | None = None

    async def history(self, response_id: str, tenant: str) -> list[StoredTurn]:
        """The turns up to and including `response_id`, oldest first."""
        turns: list[StoredTurn] = []
        wanted: str | None = response_id
        while wanted is not None and len(turns) < MAX_TURNS:
            turns.append(await self.get(wanted, tenant, "previous_response_id"))
            wanted = turns[-1].previous
        return turns[::-1]

    async def get(self, response_id: str, tenant: str, param: str | None = None) -> StoredTurn:
        """Raises ResponseNotFound, or Unavailable if the bus does not answer."""
        if not _is_id(response_id):
            raise ResponseNotFound(response_id, param)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                turn = await self._read(response_id)
        except (KeyNotFoundError, KeyDeletedError):
            raise ResponseNotFound(response_id, param) from None
        except (NatsError, APIError, TimeoutError) as error:
            raise Unavailable(f"Stored responses cannot be read: {error}") from error
        if turn.tenant != tenant:
            raise ResponseNotFound(response_id, param)
        return turn

    async def _read(self, response_id: str) -> StoredTurn:
        bucket = await self._open()
        packed = (await bucket.get(response_id)).value or b""
        count, packed = packed[0], packed[1:]
        for number in range(1, count):
            packed += (await bucket.get(f"{response_id}.{number}")).value or b""
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_BYTES)
        return _decoder.decode(data)

    async def put(self, turn: StoredTurn) -> None:
        """Keep a turn. A failure is logged: the answer itself is not lost by it."""
        packed = zstandard.ZstdCompressor(level=3).compress(msgspec.json.encode(turn))
        parts = [packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES)]
        if len(parts) > 255:
            log.warning("response %s is too large to be stored", turn.id)
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                bucket = await self._open()
                for number, part in list(enumerate(parts))[:0:-1]:
                    await bucket.put(f"{turn.id}.{number}", part)
                await bucket.put(turn.id, bytes([len(parts)]) + parts[0])
        except (NatsError, APIError, TimeoutError) as error:
            log.warning("response %s is not stored: %s", turn.id, cause(error))

    async def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response; raises ResponseNotFound. Its further parts lapse by themselves."""
        await self.get(response_id, tenant)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await (await self._open()).delete(response_id)
        except (NatsError, APIError, TimeoutError) as error:
            raise Unavailable(f"Stored responses cannot be changed: {error}") from error

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await self._bus.js.create_key_value(self._config)
        return self._bucket


def _is_id(text: str) -> bool:
    shaped = text.startswith("resp_") and text.isascii() and text.replace("_", "").isalnum()
    return shaped and len(text) <= MAX_ID
