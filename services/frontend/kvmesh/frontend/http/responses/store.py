"""Stored responses: turns in a JetStream bucket with a TTL, split to fit its message size.

A turn holds only what it adds and refers to the turn before it, so a long conversation is stored
once. All frontends of a mesh share the bucket; each tenant has a quota of its bytes.
"""

import asyncio
import logging
from functools import partial

import msgspec
import zstandard
from msgspec import Raw

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.storage.buckets import evicting_bucket
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import StoredTurn
from kvmesh.frontend.apis.responses.input_items import referenced_items
from kvmesh.frontend.apis.responses.references import References
from kvmesh.frontend.auth.bucket_quota import BucketQuota, owner_of
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.http.responses.log import ResponseLog

log = logging.getLogger(__name__)
PART_BYTES = 512 << 10
MAX_PARTS = 255  # the first part's first byte is their number
MAX_TURNS = 1000
READS = 8  # of one request at a time
MAX_TURN = 16 << 20
MAX_HISTORY = 32 << 20
SMALL = 64 << 10
TIMEOUT_S = 5.0
MAX_ID = 128
_decoder = msgspec.json.Decoder(StoredTurn)


class ResponseNotFound(ApiError):
    """The response does not exist, has expired, or belongs to another tenant.

    `param` names the field of a body that holds its id, which is then at fault as in OpenAI's API.
    """

    def __init__(self, response_id: str, param: str | None = None) -> None:
        if param is None:
            super().__init__("not_found", f"Response with id '{response_id}' not found.")
        else:
            reason = f"Previous response with id '{response_id}' not found."
            code = "previous_response_not_found"
            super().__init__("invalid_request", reason, param=param, code=code)
        self.response_id = response_id


class ResponseStore:
    """Reads and writes turns.

    A tenant may use `tenant_share` of `max_bytes`; beyond it, its oldest turns are purged.
    """

    def __init__(self, bus: Bus, ttl_s: float, max_bytes: int, tenant_share: float = 1.0) -> None:
        self._bus = bus
        name = bus.subjects.responses_bucket
        self._quota = BucketQuota(bus, name, int(max_bytes * tenant_share))
        self.bucket = evicting_bucket(bus, name, ttl_s, max_bytes)

    def log(self, response_id: str, tenant: str) -> ResponseLog:
        """The events of a background response; raises ResponseNotFound for what is no id."""
        if not _is_id(response_id):
            raise ResponseNotFound(response_id)
        entry = _entry(response_id, tenant)
        return ResponseLog(self.bucket, self._quota, entry, self._bus.max_payload // 2)

    async def history(
        self, response_id: str, tenant: str, param: str | None = "previous_response_id"
    ) -> list[StoredTurn]:
        """The turns up to and including `response_id`, oldest first, at most `MAX_TURNS`.

        `param`: the parameter with the id, for errors. With one, the turns are those of a prompt,
        which shows none before a summary.

        Raises ResponseNotFound, Unavailable, or InvalidRequest beyond `MAX_HISTORY` bytes.
        """
        turns: list[StoredTurn] = []
        next_id: str | None = response_id
        max_bytes = MAX_HISTORY
        while next_id is not None and len(turns) < MAX_TURNS:
            turn, size = await self._get(next_id, tenant, param, max_bytes)
            if turn.conversation and param is not None:
                reason = f"Response '{turn.id}' belongs to conversation '{turn.conversation}';"
                raise InvalidRequest(f"{reason} continue that with `conversation`.", param)
            turns.append(turn)
            next_id, max_bytes = turn.previous, max_bytes - size
            if turn.compacted and param is not None:
                break
        return turns[::-1]

    async def items(self, references: References, tenant: str) -> dict[str, list[Raw]]:
        """The items meant of each of these responses that is found, read in parallel.

        Raises Unavailable, or InvalidRequest for too many responses or bytes.
        """
        if len(references) > MAX_TURNS:
            raise InvalidRequest(f"`input` refers to more than {MAX_TURNS} responses.", "input")
        found: dict[str, list[Raw]] = {}
        slots, left = asyncio.Semaphore(READS), MAX_HISTORY

        async def read(response_id: str) -> None:
            nonlocal left
            async with slots:
                try:
                    turn, size = await self._get(response_id, tenant, "input", max(left, 0))
                except ResponseNotFound:
                    return
            select = partial(referenced_items, turn, references[response_id])
            in_thread = size >= SMALL and references[response_id]
            items = await asyncio.to_thread(select) if in_thread else select()
            found[response_id] = items
            left -= sum(map(len, items))

        try:
            async with asyncio.timeout(TIMEOUT_S):
                ended = await asyncio.gather(*map(read, references), return_exceptions=True)
        except TimeoutError as error:
            raise Unavailable("Cannot read stored responses in time.") from error
        for failure in ended:
            if failure is not None:
                raise failure
        return found

    async def get(self, response_id: str, tenant: str) -> StoredTurn:
        """A stored turn; raises ResponseNotFound, or Unavailable if the bucket cannot be read."""
        return (await self._get(response_id, tenant, None, MAX_HISTORY))[0]

    async def _get(
        self, response_id: str, tenant: str, param: str | None, max_bytes: int
    ) -> tuple[StoredTurn, int]:
        """A turn with its size; raises InvalidRequest if it is larger than `max_bytes`."""
        if not _is_id(response_id):
            raise ResponseNotFound(response_id, param)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                packed = await self.read(_entry(response_id, tenant))
        except NotFound:
            raise ResponseNotFound(response_id, param) from None
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Cannot read stored responses: {error}") from error
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= max_bytes:
            reason = f"The stored conversation is larger than {MAX_HISTORY} bytes."
            raise InvalidRequest(reason, param)
        small = size < SMALL
        turn = _unpacked(packed) if small else await asyncio.to_thread(_unpacked, packed)
        if turn.tenant != tenant:
            raise ResponseNotFound(response_id, param)
        return turn, size

    async def read(self, entry: str) -> bytes:
        """The bytes that `write` has stored under an entry; raises NotFound or BusError."""
        bucket = self.bucket
        packed = (await bucket.get(f"{entry}.0")).value or b""
        rest = [(await bucket.get(f"{entry}.{n}")).value or b"" for n in range(1, packed[0])]
        return b"".join([packed[1:], *rest])

    async def put(self, turn: StoredTurn) -> bool:
        """Store a turn; on failure log it and return False, so that the request still succeeds."""
        small = sum(map(len, turn.input)) + len(turn.response) < SMALL
        size, packed = _packed(turn) if small else await asyncio.to_thread(_packed, turn)
        if size > MAX_TURN:
            return self._not_stored(turn, "it is too large")
        try:
            await self.write(_entry(turn.id, turn.tenant), packed)
        except InvalidRequest as error:
            return self._not_stored(turn, error.message)
        except (BusError, TimeoutError) as error:
            return self._not_stored(turn, cause(error))
        return True

    async def write(self, entry: str, packed: bytes) -> None:
        """Store bytes in parts, within the quota of the entry's tenant, which its first token is.

        Raises BusError, TimeoutError, or InvalidRequest for too many bytes.
        """
        most = min(PART_BYTES, self._bus.max_payload // 2)
        parts = [packed[at : at + most] for at in range(0, len(packed), most)]
        if len(packed) > self._quota.max_bytes:
            raise InvalidRequest(f"It has more than {self._quota.max_bytes} bytes to store.")
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(f"It has more than {MAX_PARTS} parts of {most} bytes to store.")
        async with asyncio.timeout(TIMEOUT_S):
            await self._quota.reserve(entry, len(packed))
            for number, part in list(enumerate(parts))[:0:-1]:
                await self.bucket.put(f"{entry}.{number}", part)
            await self.bucket.put(f"{entry}.0", bytes([len(parts)]) + parts[0])

    async def remove(self, entry: str) -> None:
        """Delete what is stored under an entry; raises BusError."""
        await self._quota.purge(entry)

    def _not_stored(self, turn: StoredTurn, reason: str) -> bool:
        metrics.unstored_responses.inc()
        log.warning("response %s not stored: %s", turn.id, reason)
        return False

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response; raises ResponseNotFound or Unavailable."""
        await self.get(response_id, tenant)
        await self.purge(response_id, tenant)

    async def purge(self, response_id: str, tenant: str, before: int | None = None) -> None:
        """Delete what is stored of a response that exists, all or `before` a revision.

        Raises Unavailable.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._quota.purge(_entry(response_id, tenant), before)
        except (BusError, TimeoutError) as error:
            raise Unavailable(f"Cannot change stored responses: {error}") from error


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
