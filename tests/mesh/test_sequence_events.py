"""The ends of requests reach the routers although the server loses its streams in memory."""

import asyncio

import pytest
from support.events import MODEL
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import SeqFree
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.router.state.sequence_decoding import sequence_batch


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
