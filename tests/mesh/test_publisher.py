"""KV events with a server that loses acknowledged messages, or lowers its size limit."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from support.nats import NatsServer
from support.wait import eventually
from support.worker import ScriptedFrontend

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Cleared, KvBatch, KvEvent, Stored
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

RANK = "w-1", 0


class Engine:
    """Publishes each block that it holds on rank 0, and all of them as a dump."""

    def __init__(self, bus: Bus) -> None:
        self.held: list[KvEvent] = []
        self.dumps = 0
        subject = bus.subjects.kv("m", "w")
        self.publisher = KvPublisher(bus, subject, "w", "w-1", 0.0, self.dump)
        self.publisher.start()

    def dump(self, rank: int) -> None:
        self.dumps += 1
        self.publisher.add(rank, [Cleared(), *self.held])

    def store(self, first: int, count: int = 1) -> None:
        hashes = b"".join(n.to_bytes(8, "little") for n in range(first, first + count))
        event = Stored(0, None, hashes, bytes(len(hashes)), 11)
        self.held.append(event)
        self.publisher.add(0, [event])


@pytest_asyncio.fixture
async def engine(bus: Bus) -> AsyncIterator[Engine]:
    engine = Engine(bus)
    yield engine
    await engine.publisher.close()


class Numbers:
    """First id and number of events of every batch on the stream, as a new reader finds them."""

    def __init__(self, bus: Bus) -> None:
        self.batches: list[tuple[int, int]] = []
        subjects = bus.subjects
        self.reader = StreamReader(bus, subjects.kv_stream, subjects.kv_all, self._receive, Start())

    def _receive(self, message: StreamMessage) -> None:
        batch = msgspec.msgpack.decode(message.data, type=KvBatch)
        self.batches.append((batch.first, len(batch.events)))


async def test_a_loss_after_the_acknowledgement_shows_without_further_events(
    nats_server: NatsServer, bus: Bus, engine: Engine, tmp_path: Path
) -> None:
    engine.store(1)
    await eventually(lambda: engine.publisher.published == 1)
    await asyncio.to_thread(nats_server.back_up, tmp_path / "copy")
    await eventually(lambda: bus.connected)
    engine.store(2)
    await eventually(lambda: engine.publisher.published == 2)
    await asyncio.to_thread(nats_server.restore, tmp_path / "copy")
    made = bus.connected_at
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: bus.connected_at > made)
    numbers = Numbers(bus)
    await numbers.reader.open()
    await eventually(lambda: numbers.batches[-1:] == [(2, 0)])
    assert (1, 1) not in numbers.batches  # id 1 is missing, and every reader can see it
    await numbers.reader.close()


async def test_a_lower_size_limit_leads_to_a_dump_in_smaller_parts(
    nats_server: NatsServer, bus: Bus, frontend: ScriptedFrontend, engine: Engine
) -> None:
    frontend.contents.tolerant = True  # of the ids of what was too large
    engine.store(1, 10_000)
    await eventually(lambda: len(frontend.contents.held.get(RANK, ())) == 10_000)
    nats_server.kill()
    await eventually(lambda: not bus.connected)
    engine.store(20_001, 10_000)  # one batch of 160 KB that the server would not take
    nats_server.max_payload = "64KB"
    try:
        await asyncio.to_thread(nats_server.start)
        await eventually(lambda: len(frontend.contents.held[RANK]) == 20_000)
        assert engine.dumps == 1
    finally:
        nats_server.max_payload = "8MB"
        await asyncio.to_thread(nats_server.restart)


async def test_messages_of_an_outage_that_became_too_large_are_dropped_and_the_others_sent(
    nats_server: NatsServer, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    arrived: list[int] = []
    subject = bus.subjects.out("f")
    await bus.subscribe_raw(subject, lambda message: arrived.append(len(message.data)))
    await bus.flush()
    nats_server.kill()
    await eventually(lambda: not bus.connected)
    for size in (10, 100_000, 20):  # the second is too large for the server that comes
        await bus.client.publish(subject, bytes(size))
    nats_server.max_payload = "64KB"
    try:
        await asyncio.to_thread(nats_server.start)
        await eventually(lambda: arrived == [10, 20])
        assert "1 messages were dropped: they exceed max_payload of the NATS server" in caplog.text
    finally:
        nats_server.max_payload = "8MB"
        await asyncio.to_thread(nats_server.restart)
