"""Readers of rewound streams start over, and leave no consumer behind."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusTimeout
from kvmesh.bus.streams import reader
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.bus.streams.reader import SILENCE_S, Start, StreamMessage, StreamReader


class Follower:
    """Reads the decision stream, which is on disk; the messages are texts."""

    def __init__(self, bus: Bus, start: Start | None = None) -> None:
        self.texts: list[str] = []
        self.last: StreamMessage | None = None
        self.recreated = 0
        self.reader = StreamReader(
            bus,
            bus.subjects.route_stream,
            bus.subjects.route_all,
            self._receive,
            start or Start(),
            self._on_recreated,
        )

    def _receive(self, message: StreamMessage) -> None:
        self.texts.append(message.data.decode())
        self.last = message

    def _on_recreated(self) -> None:
        self.recreated += 1


async def write(bus: Bus, *texts: str) -> None:
    for text in texts:
        await bus.store(bus.subjects.route("m"), text.encode(), PATIENCE_S)


async def back_up(server: NatsServer, bus: Bus, copy: Path) -> None:
    """Back up the server's store; return once the bus has reconnected."""
    made = bus.connected_at
    await asyncio.to_thread(server.back_up, copy)
    await eventually(lambda: bus.connected_at > made)


async def rewind(server: NatsServer, bus: Bus, copy: Path, *texts: str) -> None:
    """Restore the copy, and write these texts before former clients reconnect."""
    await asyncio.to_thread(server.restore, copy)
    with server.at_another_address() as url:
        other = await Bus.connect(replace(bus.options, url=url), "other")
        await write(other, *texts)
        await other.close()
    await asyncio.to_thread(server.start)


async def test_a_reader_starts_over_when_sequences_were_reused(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    follower = Follower(bus)
    await write(bus, "a", "b")
    await follower.reader.open()
    await back_up(nats_server, bus, tmp_path / "copy")
    await write(bus, "lost")
    await eventually(lambda: follower.texts == ["a", "b", "lost"])
    await rewind(nats_server, bus, tmp_path / "copy", "c", "d")
    await eventually(lambda: follower.texts == ["a", "b", "lost", "a", "b", "c", "d"])
    assert follower.recreated == 1
    await follower.reader.close()


async def test_a_reader_that_resumes_from_a_sequence_notices_a_rewind(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    before = Follower(bus)
    await before.reader.open()
    await write(bus, "a")
    await back_up(nats_server, bus, tmp_path / "copy")
    await write(bus, "lost")
    await eventually(lambda: before.texts == ["a", "lost"])
    await before.reader.close()
    await rewind(nats_server, bus, tmp_path / "copy", "b", "c")
    await eventually(lambda: bus.connected)
    last = before.last
    assert last is not None
    after = Follower(bus, Start(after=last.seq, stored=last.time))
    await after.reader.open()
    await eventually(lambda: after.texts == ["a", "b", "c"])
    assert after.recreated == 1
    await after.reader.close()


async def test_a_reader_continues_if_only_read_messages_were_purged(
    nats_server: NatsServer, bus: Bus
) -> None:
    follower = Follower(bus)
    await follower.reader.open()
    await write(bus, "a", "b")
    await eventually(lambda: follower.texts == ["a", "b"])
    await bus.js.purge_stream(bus.subjects.route_stream)
    made = bus.connected_at
    await asyncio.to_thread(nats_server.restart)
    await eventually(lambda: bus.connected_at > made)
    await write(bus, "c")
    await eventually(lambda: follower.texts == ["a", "b", "c"])
    assert follower.recreated == 0
    await follower.reader.close()


async def test_many_reconnects_leave_one_consumer_per_reader(
    nats_server: NatsServer, bus: Bus
) -> None:
    followers = [Follower(bus) for _ in range(3)]
    for follower in followers:
        await follower.reader.open()
    for number in range(8):
        made = bus.connected_at
        await bus.client.force_reconnect()  # the server stays, and with it every consumer
        await eventually(lambda made=made: bus.connected_at > made)  # type: ignore[misc]
        await write(bus, str(number))
        for follower in followers:
            await eventually(lambda f=follower, n=number: f.texts[-1:] == [str(n)])  # type: ignore[misc]
    names = await bus.js.consumers_info(bus.subjects.route_stream)
    assert len(names) == len(followers)
    for follower in followers:
        await follower.reader.close()
    assert await bus.js.consumers_info(bus.subjects.route_stream) == []


async def test_a_new_connection_ends_a_long_delay(
    nats_server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowSecondDelay(Backoff):
        """The second delay of a series lasts an hour."""

        taken = 0

        def reset(self) -> None:
            self.taken = 0

        def delay(self) -> float:
            self.taken += 1
            delays.append(3600.0 if self.taken == 2 else 0.0)
            return delays[-1]

    delays: list[float] = []
    monkeypatch.setattr(reader, "Backoff", SlowSecondDelay)
    follower = Follower(bus)
    await follower.reader.open()

    async def out_of_reach(_: object) -> None:
        raise BusTimeout("the server does not reply")

    with monkeypatch.context() as outage:
        outage.setattr(bus, "using", out_of_reach)
        await bus.js.context.delete_stream(bus.subjects.route_stream)
        await eventually(lambda: 3600.0 in delays)
    await ensure_streams(bus)
    await bus.client.force_reconnect()
    await write(bus, "a")
    await eventually(lambda: follower.texts == ["a"])
    await follower.reader.close()


async def test_a_reader_reports_how_long_it_has_received_nothing(
    nats_server: NatsServer, bus: Bus
) -> None:
    follower = Follower(bus)
    await follower.reader.open()
    assert follower.reader.silent_for == 0
    await asyncio.to_thread(nats_server.kill)
    await eventually(lambda: follower.reader.silent_for > SILENCE_S)
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: follower.reader.silent_for == 0)
    await follower.reader.close()
