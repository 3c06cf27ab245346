"""The times at which a publisher of KV events sends batches."""

import asyncio
from typing import Any, cast

from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KvBatch, KvEvent, MessageDecoder, Stored
from kvmesh.bus.metrics import BusCounts
from kvmesh.bus.streams.publisher import URGENT_BYTES, KvPublisher

_batches = MessageDecoder(KvBatch)


class Stream:
    """The part of a bus that a publisher uses; keeps what it stores."""

    def __init__(self) -> None:
        self.on_reconnect: list[Any] = []
        self.kv_backlogs: set[Any] = set()
        self.counts = BusCounts()
        self.max_payload = 1 << 20
        self.connected = True
        self.batches: list[int] = []

    async def store(self, subject: str, data: bytes, timeout: float) -> None:
        self.batches.append(len(_batches.decode(data).events))


def block(number: int, count: int = 1) -> list[KvEvent]:
    hashes = number.to_bytes(8, "little") * count
    return [Stored(0, None, hashes, hashes)]


def publisher(stream: Stream, interval: float) -> KvPublisher:
    made = KvPublisher(cast(Bus, stream), "kv", "w", "w-1", interval, lambda rank: None)
    made.start()
    return made


async def test_the_first_events_leave_at_once_and_later_ones_wait_for_each_other() -> None:
    stream = Stream()
    events = publisher(stream, 3600.0)
    events.add(0, block(1))
    events.add(0, block(2))
    await eventually(lambda: stream.batches == [2])
    for number in range(3, 8):
        events.add(0, block(number))
        await asyncio.sleep(0)
    assert stream.batches == [2]
    await events.close()
    assert stream.batches == [2, 5]


async def test_events_that_wait_are_sent_without_another_one() -> None:
    stream = Stream()
    events = publisher(stream, 0.001)
    events.add(0, block(1))
    await eventually(lambda: stream.batches == [1])
    events.add(0, block(2))
    await eventually(lambda: stream.batches == [1, 1])
    await events.close()


async def test_events_that_are_wanted_soon_wait_less() -> None:
    stream = Stream()
    events = publisher(stream, 3600.0)
    events.add(0, block(1))
    await eventually(lambda: stream.batches == [1])
    events.add(0, block(2))
    events.hurry()
    await eventually(lambda: stream.batches == [1, 1])
    await events.close()


async def test_the_blocks_of_a_long_prompt_do_not_wait() -> None:
    stream = Stream()
    events = publisher(stream, 3600.0)
    events.add(0, block(1))
    await eventually(lambda: stream.batches == [1])
    events.add(0, block(2))
    events.add(0, block(3, URGENT_BYTES // 16))
    await eventually(lambda: stream.batches == [1, 2])
    await events.close()
