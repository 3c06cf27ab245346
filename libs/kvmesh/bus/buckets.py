"""All that a bucket holds at one moment."""

import asyncio

from kvmesh.bus.client import Bus
from kvmesh.bus.reader import Start, StreamMessage, StreamReader

TIMEOUT_S = 10.0


async def read_bucket(bus: Bus, bucket: str, keys: str = ">") -> dict[str, bytes]:
    """The values of all keys that match; raises the server's errors, or TimeoutError.

    The client library's own watch can call itself complete before its first entry has arrived.
    """
    prefix = f"$KV.{bucket}."
    found: dict[str, bytes] = {}

    def take(message: StreamMessage) -> None:
        if message.data:  # a deleted key has none
            found[message.subject.removeprefix(prefix)] = message.data

    last = Start(last_per_subject=True)
    reader = StreamReader(bus, f"KV_{bucket}", f"{prefix}{keys}", take, last)
    await reader.open()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await reader.caught_up.wait()
    finally:
        await reader.close()
    return found
