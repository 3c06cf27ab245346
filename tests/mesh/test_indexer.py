"""The indexer service on a real bus: it follows events, answers queries and repairs gaps."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from support.events import DUMPS, MODEL, Publisher, discard
from support.indexing import Replicas, eventually_overlaps, find_overlaps
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.errors import NoResponder
from kvmesh.bus.messages import ControlReply, MessageDecoder, OverlapQuery, OverlapReply
from kvmesh.bus.streams.configuration import StreamLimits


@pytest_asyncio.fixture
async def replicas(options: BusOptions, limits: StreamLimits, bus: Bus) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        yield Replicas(options, limits, stack)


async def test_a_stored_prompt_is_found_and_a_removed_one_is_not(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    await worker.store(1, 2, 3)
    await replicas.start()
    await eventually_overlaps(bus, [1, 2, 3, 4], {"w-1": 3})
    await worker.drop(1, 2, 3)
    await eventually_overlaps(bus, [1, 2, 3], {})
    await worker.close()


async def test_no_replica_answers_before_history_is_read_or_after_its_end(
    bus: Bus, replicas: Replicas
) -> None:
    async def silent() -> bool:
        try:
            await find_overlaps(bus, 1)
        except NoResponder:
            return True
        return False

    assert await silent()
    replica = await replicas.start()
    assert not await silent()
    await replica.stop()
    assert await silent()


async def test_a_lost_batch_is_noticed_and_repaired_by_a_dump(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    await replicas.start()
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    await worker.store(1, 2)
    await eventually_overlaps(bus, [1, 2], {"w-1": 2})
    worker.send = discard
    await worker.drop(1, 2)
    worker.send = worker.deliver
    await worker.store(5)
    await eventually_overlaps(bus, [5], {"w-1": 1})
    assert await find_overlaps(bus, 1, 2) == {}
    assert worker.dumps == 1
    await worker.close()


async def test_a_late_worker_is_asked_for_one_dump_and_not_blamed(
    bus: Bus,
    limits: StreamLimits,
    replicas: Replicas,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its machine may run a thousand engines: more requests would make it later."""
    worker = Publisher(bus, limits, "w", "w-1")
    asked: list[Reply] = []
    served = await bus.serve(bus.subjects.dump("w-1"), DUMPS, lambda _, reply: asked.append(reply))
    replica = await replicas.start()
    worker.next_event_id = 1  # the first event was lost
    await worker.store(1)
    await worker.lease.open()
    states = replica.indexer.states
    await eventually(lambda: asked)
    await eventually(lambda: any(rank.dump_requests > 2 for rank in states._unknown.values()))
    assert len(asked) == 1
    assert "no dump" not in caplog.text
    await worker.publish(worker.contents.dump())
    asked[0](ControlReply(True))
    await eventually_overlaps(bus, [1], {"w-1": 1})
    await served.unsubscribe()
    await worker.close()


async def test_a_dead_worker_leaves_the_index(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    await replicas.start()
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    await worker.store(1)
    await eventually_overlaps(bus, [1], {"w-1": 1})
    await worker.close()
    await eventually_overlaps(bus, [1], {})


async def test_a_restarted_worker_replaces_its_former_instance(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    await replicas.start()
    first = Publisher(bus, limits, "w", "w-1")
    await first.open()
    await first.store(1)
    await eventually_overlaps(bus, [1], {"w-1": 1})
    second = Publisher(bus, limits, "w", "w-2")
    await second.open()
    await eventually_overlaps(bus, [1], {})
    await second.store(1, 2)
    await eventually_overlaps(bus, [1, 2], {"w-2": 2})
    await first.close()
    await eventually_overlaps(bus, [1, 2], {"w-2": 2})
    await second.close()


async def test_a_new_replica_does_not_report_departed_workers(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    gone = Publisher(bus, limits, "gone", "gone-1")
    await gone.store(1)
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    await worker.store(1)
    await replicas.start()
    assert await find_overlaps(bus, 1) == {"w-1": 1}
    await worker.close()


async def test_malformed_messages_and_queries_do_not_stop_the_service(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    replica = await replicas.start()
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    for junk in (b"", b"\xc1", b"\xff" * 1000):
        await bus.client.publish(bus.subjects.kv(MODEL, "w"), junk)
        reply = await bus.client.request(bus.subjects.index(MODEL), junk, timeout=PATIENCE_S)
        assert reply.data
    query = OverlapQuery([b"odd"])
    reply_ = await bus.request(
        bus.subjects.index(MODEL), query, MessageDecoder(OverlapReply), PATIENCE_S
    )
    assert reply_ == OverlapReply([], [])
    await worker.store(1)
    await eventually_overlaps(bus, [1], {"w-1": 1})
    measures = replica.indexer.figures()
    assert measures["malformed"] == 3
    assert measures["bad_queries"] == 4
    await worker.close()
