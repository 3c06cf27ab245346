"""Events of active sequences while their stream delivers nothing."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

import msgspec
import pytest
import pytest_asyncio
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import SeqBatch, SeqEvent, SeqFree, SeqPrefilled
from kvmesh.bus.packs import EMPTY
from kvmesh.router.sequence_feed import SequenceFeed


class Followed:
    """A router's feed, checked as the router does, and all that it has passed on."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.seen: list[SeqEvent] = []
        self.feed = SequenceFeed(bus, "own", lambda _, batch: self.seen.extend(batch.events))
        self.subject = bus.subjects.seq("m")

    def publish(self, *events: SeqEvent) -> None:
        """Another process publishes."""
        self.bus.post(self.subject, SeqBatch("other", list(events)))

    async def check(self) -> None:
        while True:
            await self.feed.check(monotonic())
            await asyncio.sleep(0.05)

    @property
    def is_direct(self) -> bool:
        return self.feed._direct is not None


@pytest_asyncio.fixture
async def followed(bus: Bus) -> AsyncIterator[Followed]:
    followed = Followed(bus)
    await followed.feed.reader.open()
    checks = asyncio.create_task(followed.check())
    yield followed
    checks.cancel()
    await followed.feed.stop()
    await followed.feed.reader.close()


async def test_events_arrive_once_from_a_stream_that_delivers(followed: Followed) -> None:
    followed.feed.post(followed.subject, [SeqPrefilled("a")])
    followed.publish(SeqFree("a"))
    await eventually(lambda: followed.seen == [SeqPrefilled("a"), SeqFree("a")])
    assert not followed.is_direct


async def test_events_arrive_while_the_stream_delivers_nothing(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.feed.reader.pause()
    followed.feed.post(followed.subject, [SeqPrefilled("a")])
    await eventually(lambda: followed.is_direct)
    followed.bus.post(followed.subject, msgspec.Raw(EMPTY))  # a probe of `kvmesh doctor`
    followed.publish(SeqPrefilled("b"), SeqFree("b"))
    await eventually(lambda: followed.seen == [SeqPrefilled("b"), SeqFree("b")])

    # what the stream delivers late of a request that has ended is dropped
    followed.feed.reader.resume()
    await eventually(lambda: SeqPrefilled("a") in followed.seen)
    assert followed.seen.count(SeqPrefilled("b")) == 1
    assert "malformed" not in caplog.text

    async def is_calm() -> bool:
        followed.feed.post(followed.subject, [SeqPrefilled("c")])
        return not followed.is_direct

    await eventually(is_calm, what="only the stream is read again")
