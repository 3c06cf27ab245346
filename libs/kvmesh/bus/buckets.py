"""All that a bucket holds at one moment, and buckets that make room for what is new."""

import asyncio
from collections.abc import Callable

from nats.js.api import DiscardPolicy, KeyValueConfig, StorageType, StreamConfig
from nats.js.errors import APIError
from nats.js.kv import KeyValue

from kvmesh.bus.client import Bus
from kvmesh.bus.reader import Start, StreamMessage, StreamReader

TIMEOUT_S = 10.0
NAME_IN_USE = 10058
SIZE = "Nats-Msg-Size"


async def read_bucket(bus: Bus, bucket: str, keys: str = ">") -> dict[str, bytes]:
    """The values of all keys that match; raises the server's errors, or TimeoutError.

    The client library's own watch can call itself complete before its first entry has arrived.
    """
    prefix = f"$KV.{bucket}."
    found: dict[str, bytes] = {}

    def take(message: StreamMessage) -> None:
        if message.data:  # a deleted key has none
            found[message.subject.removeprefix(prefix)] = message.data

    await _read(bus, bucket, keys, take, Start(last_per_subject=True))
    return found


async def bucket_sizes(bus: Bus, bucket: str, keys: str = ">") -> dict[str, int]:
    """How many bytes the keys that match have, the oldest value first; errors as above."""
    prefix = f"$KV.{bucket}."
    found: dict[str, int] = {}

    def take(message: StreamMessage) -> None:
        if size := int((message.headers or {}).get(SIZE, 0)):
            found[message.subject.removeprefix(prefix)] = size

    await _read(bus, bucket, keys, take, Start(last_per_subject=True, headers_only=True))
    return found


async def _read(
    bus: Bus, bucket: str, keys: str, take: Callable[[StreamMessage], None], start: Start
) -> None:
    reader = StreamReader(bus, f"KV_{bucket}", f"$KV.{bucket}.{keys}", take, start)
    await reader.open()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await reader.caught_up.wait()
    finally:
        await reader.close()


async def keys_bucket(bus: Bus) -> KeyValue:
    """The bucket of API keys, made if it is missing."""
    config = KeyValueConfig(bucket=bus.subjects.keys_bucket, replicas=bus.options.replicas)
    return await bus.js.create_key_value(config)


async def evicting_bucket(bus: Bus, bucket: str, ttl_s: float, max_bytes: int) -> KeyValue:
    """A bucket that drops its oldest values where it is full; one that is there stays as it is.

    The client library makes only buckets that refuse new values then.
    """
    stream = StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
        discard=DiscardPolicy.OLD,
        max_age=ttl_s,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        num_replicas=bus.options.replicas,
        storage=StorageType.FILE,
    )
    try:
        await bus.js.add_stream(stream)
    except APIError as error:
        if error.err_code != NAME_IN_USE:
            raise
    return await bus.js.key_value(bucket)
