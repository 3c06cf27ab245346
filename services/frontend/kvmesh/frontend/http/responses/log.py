"""The events of background responses, stored so that any frontend can send them again.

A response has a *head*, which names the frontend that generates it, and numbered *records* of its
events. Each record is created once: a frontend that finds its next number taken has been replaced,
or the response was cancelled, and stops. They lie beside the finished response in the bucket, under
the same entry, so that its quota, age and deletion hold for them, too. A value that exceeds a
message is stored in *parts*, whose names it then holds in its place.
"""

import asyncio
import secrets
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
MAX_RECORD = 64 << 20  # before compression
MAX_BEGUN = MAX_RECORD // 2  # of the first events, which repeat the request, as the last ones do
MAX_BODY = 2 << 20  # of a request with which another frontend can go on
END = b"\n\n"
IN_PARTS = b"\0parts"  # no compressed value begins so


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


class _Parts(Struct, array_like=True):
    """The names of the parts, in place of a value that is stored in them."""

    token: str
    count: int


class _Numbered(Struct):
    sequence_number: int
    response: Raw = Raw(b"")


_heads = msgspec.msgpack.Decoder(RunHead)
_records = msgspec.msgpack.Decoder(EventRecord)
_parts = msgspec.msgpack.Decoder(_Parts)
_events = msgspec.json.Decoder(_Numbered)


def events(frames: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, frame and response object, if it has one, of each event."""
    for frame in frames.split(END)[:-1]:
        found = _events.decode(frame.partition(b"data: ")[2])
        yield found.sequence_number, frame + END, bytes(found.response)


class ResponseLog:
    """Head and records of one response of a tenant; raises BusError, or Unavailable if late.

    `most` is the size in bytes of the largest message.
    """

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

        A body of more than MAX_BODY is left out.
        """
        if len(head.body) > MAX_BODY:
            head = replace(head, body=b"")
        return await self._create(HEAD, _packed(head))

    async def replace(self, head: RunHead, revision: int) -> int:
        """Replace the head of that revision; raises Conflict if another one has."""
        packed = await self._fitting(HEAD, _packed(head))
        return await self._bucket.update(self._key(HEAD), packed, last=revision)

    async def append(self, number: int, record: EventRecord) -> int:
        """Store the record of that number; returns its revision. Raises Conflict if it is there."""
        return await self._create(f"e{number}", _packed(record))

    async def record(self, number: int) -> EventRecord | None:
        """The record of that number; None if it is not there yet."""
        try:
            return _records.decode(_unpacked((await self._get(f"e{number}"))[0]))
        except NotFound:
            return None

    def _key(self, name: str) -> str:
        return f"{self._entry}.{name}"

    async def _get(self, name: str) -> tuple[bytes, int]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._bucket.get(self._key(name))
                value = found.value or b""
                if value.startswith(IN_PARTS):
                    parts = _parts.decode(value[len(IN_PARTS) :])
                    keys = (self._key(f"{name}-{parts.token}-{n}") for n in range(parts.count))
                    value = b"".join([(await self._bucket.get(key)).value or b"" for key in keys])
        except TimeoutError as error:
            raise Unavailable("Cannot read stored responses in time.") from error
        except msgspec.MsgspecError as error:
            raise BusError(f"a stored event is damaged: {error}") from error
        return value, found.revision or 0

    async def _create(self, name: str, packed: bytes) -> int:
        await self._quota.reserve(self._entry, len(packed))
        return await self._bucket.create(self._key(name), await self._fitting(name, packed))

    async def _fitting(self, name: str, packed: bytes) -> bytes:
        """The value, or what stands for it once its parts are stored."""
        if len(packed) <= self._most:
            return packed
        starts = range(0, len(packed), self._most)
        parts = _Parts(secrets.token_hex(8), len(starts))
        for number, start in enumerate(starts):
            key = self._key(f"{name}-{parts.token}-{number}")
            await self._bucket.create(key, packed[start : start + self._most])
        return IN_PARTS + msgspec.msgpack.encode(parts)


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
