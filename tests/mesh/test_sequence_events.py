"""The ends of requests reach the routers although the server loses its streams in memory."""

import asyncio

import pytest
from msgspec.structs import replace
from support.events import MODEL
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import Instance, MessageDecoder, Outcome, Role, SeqFree
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.router.state.sequence_decoding import sequence_batch

outcomes = MessageDecoder(Outcome)


async def test_an_end_is_published_again_until_the_stream_is_restored(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits
) -> None:
    publisher = SequenceEventPublisher(bus, "frontend-0")
    publishing = asyncio.create_task(publisher.run())
    publisher.event(MODEL, SeqFree("before"))
    publisher.flush()
    await bus.flush()
    await asyncio.to_thread(nats_server.restart)
    await eventually(lambda: bus.counts.reconnects and bus.connected)
    publisher.event(MODEL, SeqFree("unheard"))
    publisher.flush()
    await bus.flush()
    with pytest.raises(NotFound):
        await bus.js.stream_info(bus.subjects.seq_stream)

    await ensure_streams(bus, limits)
    read: set[str] = set()

    def receive(message: StreamMessage) -> None:
        read.update(
            e.request for e in sequence_batch(message.data).events if isinstance(e, SeqFree)
        )

    reader = StreamReader(bus, bus.subjects.seq_stream, bus.subjects.seq_all, receive, Start())
    await reader.open()
    await eventually(lambda: read == {"before", "unheard"}, what="both ends are on the stream")
    await reader.close()
    publishing.cancel()
    await asyncio.wait([publishing])


async def test_outcomes_travel_together_once_every_reader_unpacks_them(
    bus: Bus, limits: StreamLimits
) -> None:
    await ensure_streams(bus, limits)
    directory = Directory(bus, limits)
    await directory.open()
    publisher = SequenceEventPublisher(bus, "frontend-0", directory)
    subject, stream = bus.subjects.route(MODEL), bus.subjects.route_stream
    read: list[str] = []
    heard: list[str] = []
    reader = StreamReader(
        bus, stream, subject, lambda m: read.append(outcomes.decode(m.data).request), Start()
    )
    await reader.open()
    await bus.subscribe(subject, outcomes, lambda o: heard.append(o.request))

    async def publish(*requests: str) -> int:
        """Stored messages of the outcomes of these requests."""
        before = (await bus.js.stream_info(stream)).state.messages
        for request in requests:
            publisher.outcome(MODEL, outcome(request))
        publisher.flush()
        await eventually(lambda: read[-1:] == heard[-1:] == [requests[-1]])
        return (await bus.js.stream_info(stream)).state.messages - before

    assert await publish("a", "b", "c") == 1
    card = Instance(
        instance="planner-0-1", role=Role.PLANNER, name="planner-0", version="0", started=0.0
    )
    older = Lease(bus, card, limits)
    await older.open()
    await eventually(lambda: not directory.packs, what="a reader of an older version has joined")
    assert await publish("d", "e") == 2
    await older.update(replace(card, unpacks=True))
    await eventually(lambda: directory.packs, what="it is of this version now")
    assert await publish("f", "g") == 1
    await older.close()
    assert read == heard == list("abcdefg")
    await reader.close()
    await directory.close()


def outcome(request: str) -> Outcome:
    return Outcome(
        request=request,
        instance="w-0-1",
        time=1.0,
        cached_tokens=0,
        output_tokens=1,
        ttft_s=0.1,
        total_s=0.2,
        finish="stop",
    )
