"""Remote store in Redis: one string per block, whose expiry is its lease.

Configure `maxmemory` and the policy `allkeys-lru` or `volatile-ttl`, so that the server limits its
memory.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError

from kvmesh.bus.errors import cause
from kvmesh.kvbm.tiers.remote.interface import NOTE_LENGTH_BYTES, RemoteBlock, RemoteError

T = TypeVar("T")
BATCH_BYTES = 8 << 20
BATCH_KEYS = 4096
FIRST_KEYS = 64
CONNECTIONS = 8
MAX_SCANS = 64


class RedisStore:
    """`url` is redis://, rediss:// or unix://; raises ValueError otherwise.

    `timeout_s` bounds each exchange with the server, of at most BATCH_BYTES or BATCH_KEYS.
    """

    def __init__(self, url: str, namespace: str, lease_s: float, timeout_s: float) -> None:
        self._prefix = f"kvmesh:{namespace}:".encode()
        self._lease_ms = max(1, round(1000 * lease_s))
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
        self._redis = Redis(connection_pool=pool)

    async def find(self, digests: Sequence[bytes]) -> int:
        start, count = 0, FIRST_KEYS  # few: the store has no blocks of most prompts
        while start < len(digests):
            part = digests[start : start + count]
            found = await self._checked("find", lambda part=part: self._renew(part))  # type: ignore[misc]
            if not all(found):
                return start + found.index(False)
            start, count = start + count, min(8 * count, BATCH_KEYS)
        return len(digests)

    async def put(self, blocks: Sequence[RemoteBlock]) -> None:
        sizes = [len(block.note) + block.content.nbytes for block in blocks]
        for start, stop in pairwise(batches(sizes)):
            part = blocks[start:stop]
            await self._checked("put", lambda part=part: self._set(part))  # type: ignore[misc]

    async def get(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bytes | None]:
        notes: list[bytes | None] = []
        for start, stop in pairwise(batches([buffer.nbytes for buffer in into])):
            keys = [self._prefix + digest for digest in digests[start:stop]]
            values = await self._checked("get", lambda keys=keys: self._redis.mget(keys))  # type: ignore[misc]
            notes += map(unpack, values, into[start:stop])
        return notes

    async def drop(self, digests: Sequence[bytes]) -> None:
        for start in range(0, len(digests), BATCH_KEYS):
            keys = [self._prefix + digest for digest in digests[start : start + BATCH_KEYS]]
            await self._checked("drop", lambda keys=keys: self._redis.unlink(*keys))  # type: ignore[misc]

    async def is_empty(self) -> bool:
        cursor = 0
        for _ in range(MAX_SCANS):  # of a server with many other keys
            call = partial(self._redis.scan, cursor, self._prefix + b"*", BATCH_KEYS)
            cursor, keys = await self._checked("look", call)
            if keys:
                return False
            if not cursor:
                return True
        return False

    async def tend(self) -> None:
        """Nothing to do: the server drops expired blocks."""

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _renew(self, digests: Sequence[bytes]) -> list[bool]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for digest in digests:
                pipeline.pexpire(self._prefix + digest, self._lease_ms)
            return [bool(renewed) for renewed in await pipeline.execute()]

    async def _set(self, blocks: Sequence[RemoteBlock]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for block in blocks:
                value = pack(block)
                pipeline.set(self._prefix + block.digest, value, px=self._lease_ms, nx=True)
            await pipeline.execute()

    async def _checked(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        except (RedisError, OSError, TimeoutError) as error:
            raise RemoteError(operation, cause(error)) from error


def batches(sizes: Sequence[int]) -> list[int]:
    """Boundaries of batches over blocks of these sizes, both ends included; no batch is empty."""
    cuts, held = [0], 0
    for i, size in enumerate(sizes):
        if held and held + size > BATCH_BYTES:
            cuts.append(i)
            held = 0
        held += size
    return [*cuts, len(sizes)] if sizes else [0]


def pack(block: RemoteBlock) -> bytes:
    """Length of the note (uint32), note, content."""
    return b"".join(
        (len(block.note).to_bytes(NOTE_LENGTH_BYTES, "little"), block.note, block.content)
    )


def unpack(value: bytes | str | None, into: memoryview) -> bytes | None:
    """Copy the content into `into`; return the note, None if `value` has another size."""
    if not isinstance(value, bytes) or len(value) < NOTE_LENGTH_BYTES:
        return None
    start = NOTE_LENGTH_BYTES + int.from_bytes(value[:NOTE_LENGTH_BYTES], "little")
    if len(value) - start != into.nbytes:
        return None
    into[:] = memoryview(value)[start:]
    return value[NOTE_LENGTH_BYTES:start]
