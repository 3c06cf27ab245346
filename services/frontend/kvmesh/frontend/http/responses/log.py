"""The events of background responses, stored so that any frontend can send them again.

A response has a *head*, which names the frontend that generates it, and numbered *records* of its
events. Each record is created once: a frontend that finds its next number taken has been replaced,
or the response was cancelled, and stops. They lie beside the finished response in the bucket, under
the same entry, so that its quota, age and deletion hold for them, too.
"""

import asyncio
from collections.abc import Iterator

import msgspec
import zstandard
from msgspec import Raw, Struct
from msgspec.structs import replace

from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import BusError, NotFound
from kvmesh.frontend.auth.bucket_quota import BucketQuota
from kvmesh.frontend.errors import Unavailable

TIMEOUT_S = 5.0
HEAD = "head"
MAX_RECORD = 16 << 20  # before compression
MAX_BODY = 2 << 20  # of a request with which another frontend can go on
END = b"\n\n"


class RunHead(Struct, array_like=True):
    """The frontend that generates a response, and what another one needs to go on.

    `body` and `headers` are those of the request, `token` and `created` its stamp; an empty `body`
    is not continued. `response` is the response object so far; once it is not in progress any more,
    `owner` is empty. `target` is the model that generates it, where the body names an alias.
    """

    owner: str
    token: str
    created: int
    body: bytes
    headers: dict[str, str]
    response: bytes
    target: str = ""


class EventRecord(Struct, array_like=True):
    """Events as they were sent, and the tokens that were rendered since the record before.

    `cuts` are the numbers of tokens after which frames were made; `ends`: no record follows.
    """

    frames: bytes
    tokens: list[int]
    cuts: list[int]
    ends: bool = False


class _Numbered(Struct):
    sequence_number: int
    response: Raw = Raw(b"")


_heads = msgspec.msgpack.Decoder(RunHead)
_records = msgspec.msgpack.Decoder(EventRecord)
_events = msgspec.json.Decoder(_Numbered)


def events(frames: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, frame and response object, if it has one, of each event."""
    for frame in frames.split(END)[:-1]:
        found = _events.decode(frame.partition(b"data: ")[2])
        yield found.sequence_number, frame + END, bytes(found.response)


class ResponseLog:
    """Head and records of one response of a tenant; raises BusError, or Unavailable if late."""

    def __init__(self, bucket: Bucket, quota: BucketQuota, entry: str, most: int) -> None:
        self._bucket = bucket
        self._quota = quota
        self._entry = entry
        self._most = most

    async def head(self) -> tuple[RunHead, int]:
        """The head and its revision; raises NotFound."""
        found = await self._get(HEAD)
        return _heads.decode(_unpacked(found[0])), found[1]

    async def begin(self, head: RunHead) -> int:
        """Store the head of a new response; returns its revision.

        A body with which the head has more than `most` bytes is left out.
        """
        packed = _packed(head)
        if len(head.body) > MAX_BODY or len(packed) > self._most:
            packed = _packed(replace(head, body=b""))
        return await self._create(HEAD, packed)

    async def replace(self, head: RunHead, revision: int) -> int:
        """Replace the head of that revision; raises Conflict if another one has."""
        return await self._bucket.update(f"{self._entry}.{HEAD}", _packed(head), last=revision)

    async def append(self, number: int, record: EventRecord) -> int:
        """Store the record of that number; returns its revision. Raises Conflict if it is there."""
        return await self._create(f"e{number}", _packed(record))

    async def record(self, number: int) -> EventRecord | None:
        """The record of that number; None if it is not there yet."""
        try:
            return _records.decode(_unpacked((await self._get(f"e{number}"))[0]))
        except NotFound:
            return None

    async def _get(self, name: str) -> tuple[bytes, int]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._bucket.get(f"{self._entry}.{name}")
        except TimeoutError as error:
            raise Unavailable("Cannot read stored responses in time.") from error
        return found.value or b"", found.revision or 0

    async def _create(self, name: str, packed: bytes) -> int:
        await self._quota.reserve(self._entry, len(packed))
        return await self._bucket.create(f"{self._entry}.{name}", packed)


def _packed(value: RunHead | EventRecord) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(value))


def _unpacked(packed: bytes) -> bytes:
    """The content; raises BusError if it is larger than any that a frontend stores."""
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= MAX_RECORD:
            raise BusError("a stored event is too large")
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise BusError(f"a stored event is damaged: {error}") from error
