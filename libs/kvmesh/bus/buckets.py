"""All that a bucket holds at one moment."""

import asyncio
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.reader import Start, StreamMessage, StreamReader

TIMEOUT_S = 10.0
OPERATION = "KV-Operation"  # of a message that deletes a key


async def read_bucket(bus: Bus, bucket: str, keys: str = ">") -> dict[str, bytes]:
    """The values of all keys that match; raises the server's errors, or TimeoutError."""
    found: dict[str, bytes] = {}

    def take(key: str, message: StreamMessage) -> None:
        if message.data:  # a deleted key has none
            found[key] = message.data

    await _read(bus, bucket, keys, take, headers_only=False)
    return found


async def read_headers(bus: Bus, bucket: str, keys: str = ">") -> dict[str, dict[str, str]]:
    """The headers of all keys that match, without reading values; raises as `read_bucket` does."""
    found: dict[str, dict[str, str]] = {}

    def take(key: str, message: StreamMessage) -> None:
        headers = message.headers or {}
        if OPERATION not in headers:
            found[key] = headers

    await _read(bus, bucket, keys, take, headers_only=True)
    return found


async def _read(
    bus: Bus,
    bucket: str,
    keys: str,
    take: Callable[[str, StreamMessage], None],
    headers_only: bool,
) -> None:
    """The client library's own watch can call itself complete before its first entry arrives."""
    prefix = f"$KV.{bucket}."
    start = Start(last_per_subject=True, headers_only=headers_only)

    def found(message: StreamMessage) -> None:
        take(message.subject.removeprefix(prefix), message)

    reader = StreamReader(bus, f"KV_{bucket}", f"{prefix}{keys}", found, start)
    await reader.open()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await reader.caught_up.wait()
    finally:
        await reader.close()
