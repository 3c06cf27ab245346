"""Stored responses: each turn in a JetStream bucket with a TTL, cut to the server's message size.

A turn holds only what it added, and names the turn before it, so that a long conversation is
stored once. Every frontend of a mesh sees the same bucket; of its bytes each tenant has a share.
"""

import asyncio
import logging

import msgspec
import zstandard

from kvmesh.bus.buckets import evicting_bucket
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.jetstream import Bucket
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import StoredTurn
from kvmesh.frontend.auth.bucket_quota import BucketQuota, owner_of
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable

log = logging.getLogger(__name__)
PART_BYTES = 512 << 10
MAX_TURNS = 1000
MAX_TURN = 16 << 20
MAX_HISTORY = 32 << 20
SMALL = 64 << 10
TIMEOUT_S = 5.0
MAX_ID = 128
_decoder = msgspec.json.Decoder(StoredTurn)


class ResponseNotFound(ApiError):
    """No such response, not any more, or not of this tenant."""

    def __init__(self, response_id: str, param: str | None = None) -> None:
        super().__init__("not_found", f"Response with id '{response_id}' not found.", param=param)
        self.response_id = response_id


class ResponseStore:
    """Reads and writes turns; a missing bucket is made on first use.

    Of `max_bytes`, one tenant has no more than `tenant_share`: its own oldest turns go first.
    """

    def __init__(self, bus: Bus, ttl_s: float, max_bytes: int, tenant_share: float = 1.0) -> None:
        self._bus = bus
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        name = bus.subjects.responses_bucket
        self._quota = BucketQuota(bus, name, int(max_bytes * tenant_share))
        self._bucket: Bucket | None = None

    async def history(self, response_id: str, tenant: str) -> list[StoredTurn]:
        """The turns up to and including `response_id`, oldest first; no more than `MAX_HISTORY`."""
        turns: list[StoredTurn] = []
        wanted: str | None = response_id
        room = MAX_HISTORY
        while wanted is not None and len(turns) < MAX_TURNS:
            turn, size = await self._get(wanted, tenant, "previous_response_id", room)
            turns.append(turn)
            wanted, room = turn.previous, room - size
        return turns[::-1]

    async def get(self, response_id: str, tenant: str) -> StoredTurn:
        """Raises ResponseNotFound, or Unavailable if the bucket does not answer."""
        return (await self._get(response_id, tenant, None, MAX_HISTORY))[0]

    async def _get(
        self, response_id: str, tenant: str, param: str | None, room: int
    ) -> tuple[StoredTurn, int]:
        """A turn with its size; raises InvalidRequest if it is larger than `room`."""
        if not _is_id(response_id):
            raise ResponseNotFound(response_id, param)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                packed = await self._read(_entry(response_id, tenant))
        except NotFound:
            raise ResponseNotFound(response_id, param) from None
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Stored responses cannot be read: {error}") from error
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= room:
            reason = f"The stored conversation is larger than {MAX_HISTORY} bytes."
            raise InvalidRequest(reason, param)
        small = size < SMALL
        turn = _unpacked(packed) if small else await asyncio.to_thread(_unpacked, packed)
        if turn.tenant != tenant:
            raise ResponseNotFound(response_id, param)
        return turn, size

    async def _read(self, entry: str) -> bytes:
        bucket = await self._open()
        packed = (await bucket.get(f"{entry}.0")).value or b""
        rest = [(await bucket.get(f"{entry}.{n}")).value or b"" for n in range(1, packed[0])]
        return b"".join([packed[1:], *rest])

    async def put(self, turn: StoredTurn) -> bool:
        """Keep a turn; False if it is not kept. The answer itself is not lost by that."""
        small = sum(map(len, turn.input)) + len(turn.response) < SMALL
        size, packed = _packed(turn) if small else await asyncio.to_thread(_packed, turn)
        if size > MAX_TURN or len(packed) > self._quota.most:
            return self._lost(turn, "it is too large")
        parts = [packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES)]
        entry = _entry(turn.id, turn.tenant)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                bucket = await self._open()
                await self._quota.make_room(entry, len(packed))
                for number, part in list(enumerate(parts))[:0:-1]:
                    await bucket.put(f"{entry}.{number}", part)
                await bucket.put(f"{entry}.0", bytes([len(parts)]) + parts[0])
        except (BusError, TimeoutError) as error:
            return self._lost(turn, cause(error))
        return True

    def _lost(self, turn: StoredTurn, reason: str) -> bool:
        metrics.unstored.inc()
        log.warning("response %s is not stored: %s", turn.id, reason)
        return False

    async def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response; raises ResponseNotFound."""
        await self.get(response_id, tenant)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._quota.purge(_entry(response_id, tenant))
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Stored responses cannot be changed: {error}") from error

    async def _open(self) -> Bucket:
        if self._bucket is None:
            name = self._bus.subjects.responses_bucket
            self._bucket = await evicting_bucket(self._bus, name, self._ttl_s, self._max_bytes)
        return self._bucket


def _packed(turn: StoredTurn) -> tuple[int, bytes]:
    """Size before and bytes after compression."""
    data = msgspec.json.encode(turn)
    return len(data), zstandard.ZstdCompressor(level=3).compress(data)


def _unpacked(packed: bytes) -> StoredTurn:
    return _decoder.decode(zstandard.ZstdDecompressor().decompress(packed))


def _entry(response_id: str, tenant: str) -> str:
    return f"{owner_of(tenant)}.{response_id}"


def _is_id(text: str) -> bool:
    shaped = text.startswith("resp_") and text.isascii() and text.replace("_", "").isalnum()
    return shaped and len(text) <= MAX_ID
