"""Snapshots on a real bus: written by one replica, restored by the next, never trusted blindly."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.events import Publisher
from support.indexing import Replica, Replicas, eventually_overlaps, find_overlaps, overwrite_newest
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.indexer.snapshots.snapshot_store import SLOTS, SnapshotStore
from kvmesh.settings.schema import IndexerSettings as Settings

OFTEN = Settings(snapshot_threshold=10)


@pytest_asyncio.fixture
async def replicas(options: BusOptions, limits: StreamLimits, bus: Bus) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        yield Replicas(options, limits, stack)


@pytest_asyncio.fixture
async def worker(bus: Bus, limits: StreamLimits) -> AsyncIterator[Publisher]:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    yield worker
    await worker.close()


async def fill(worker: Publisher, start: int, count: int = 10) -> None:
    """Store prompts of two blocks: (start, start + 1), (start + 1, start + 2), …"""
    for first in range(start, start + count):
        await worker.store(first, first + 1)
    await worker.bus.flush()


async def covered(bus: Bus) -> list[int]:
    return [slot.covered for slot in await SnapshotStore(bus).slots("whole")]


async def first_seq(bus: Bus) -> int:
    return (await bus.js.stream_info(bus.subjects.kv_stream)).state.first_seq


async def last_seq(bus: Bus) -> int:
    return (await bus.js.stream_info(bus.subjects.kv_stream)).state.last_seq


async def generations(bus: Bus, worker: Publisher, count: int, start: int = 1) -> None:
    """Make the leader write this many snapshots, one per ten messages."""
    for generation in range(count):
        before = await covered(bus)
        await fill(worker, start + 10 * generation)

        async def newer(before: list[int] = before) -> bool:
            return (await covered(bus))[:1] > before[:1]

        await eventually(newer)


async def test_a_replica_restores_blocks_purged_from_the_stream(
    bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 4)
    assert len(await covered(bus)) == SLOTS
    await eventually(lambda: purged(bus))
    await fill(worker, 101, 3)
    await first.stop()
    second = await replicas.start(Settings())
    assert await find_overlaps(bus, 1, 2) == {"w-1": 2}
    assert await find_overlaps(bus, 103, 104) == {"w-1": 2}
    assert second.indexer.feed.counts.messages < 20
    assert worker.dumps == 0


async def purged(bus: Bus) -> bool:
    return await first_seq(bus) > 1


async def test_the_stream_retains_the_messages_after_the_previous_snapshot(
    bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    replica = await replicas.start(OFTEN)
    await generations(bus, worker, 3)
    await eventually(lambda: replica.indexer.snapshotter.counts.snapshots == 3)
    newest, before, _ = await covered(bus)
    await eventually(lambda: purged(bus))
    assert await first_seq(bus) == before
    assert before < newest


@pytest.mark.parametrize(("damage", "version"), [(b"damage", 1), (None, 999)])
async def test_an_unusable_newest_snapshot_is_skipped(
    bus: Bus,
    worker: Publisher,
    replicas: Replicas,
    damage: bytes | None,
    version: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 3)
    await first.stop()
    await overwrite_newest(bus, damage, version)
    second = await replicas.start(Settings())
    assert second.indexer.figures()["snapshots_skipped"] == 1
    assert sum("skipped snapshot whole" in line for line in caplog.messages) == 1
    assert await find_overlaps(bus, 1, 2) == {"w-1": 2}
    assert await find_overlaps(bus, 30, 31) == {"w-1": 2}
    assert worker.dumps == 0


@pytest.mark.parametrize("description", [b"{", b'{"name": "x", "bucket": "b", "nuid": "a b"}'])
async def test_snapshots_with_unreadable_descriptions_are_replaced(
    bus: Bus, worker: Publisher, replicas: Replicas, description: bytes
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 3)
    await first.stop()
    store, bucket = SnapshotStore(bus), bus.subjects.index_bucket
    for slot in await store.slots("whole"):
        name = base64.urlsafe_b64encode(slot.name.encode()).decode()
        await bus.store(f"$O.{bucket}.M.{name}", description, 5, {"Nats-Rollup": "sub"})
    await replicas.start(OFTEN)
    await generations(bus, worker, 4, 50)
    assert min(await covered(bus)) > 0


async def test_a_snapshot_whose_chunks_are_gone_is_skipped(
    bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 2)
    await first.stop()
    slot = (await SnapshotStore(bus).slots("whole"))[0]
    bucket = bus.subjects.index_bucket
    await bus.js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.{slot.nuid}")
    second = await replicas.start(Settings())
    assert second.indexer.snapshotter.counts.snapshots_skipped == 1
    assert await find_overlaps(bus, 20, 21) == {"w-1": 2}


async def test_chunks_without_an_object_are_purged(
    bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    bucket = bus.subjects.index_bucket
    orphan = f"$O.{bucket}.C.lost"
    await bus.js.context.publish(orphan, b"half a snapshot")
    await replicas.start(OFTEN)
    await generations(bus, worker, 3)

    async def swept() -> bool:
        info = await bus.js.stream_info(f"OBJ_{bucket}", subjects_filter=orphan)
        return not info.state.subjects

    await eventually(swept)


async def test_only_one_of_several_replicas_writes(
    bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    several = [await replicas.start(OFTEN) for _ in range(3)]

    def writers() -> list[Replica]:
        return [r for r in several if r.indexer.snapshotter.counts.snapshots]

    await generations(bus, worker, 2)
    await eventually(writers)
    (leader,) = writers()
    await leader.stop()
    await generations(bus, worker, 1, start=101)
    await eventually(lambda: len(writers()) == 2)


async def test_a_stream_gap_is_repaired_by_dumps_even_of_idle_workers(
    bus: Bus, limits: StreamLimits, worker: Publisher, replicas: Replicas
) -> None:
    idle = Publisher(bus, limits, "idle", "idle-1")
    await idle.open()
    await idle.store(1, 2)
    await fill(worker, 1)

    async def stored() -> bool:
        return (await bus.js.stream_info(bus.subjects.kv_stream)).state.last_seq == 11

    await eventually(stored)  # or what comes later would be numbered from 6 on
    await bus.js.purge_stream(bus.subjects.kv_stream, seq=6)
    replica = await replicas.start(Settings())
    await eventually_overlaps(bus, [1, 2], {"w-1": 2, "idle-1": 2})
    assert (idle.dumps, worker.dumps) == (1, 1)
    assert replica.indexer.feed.counts.stream_gaps == 1
    await idle.close()


async def test_reset_states_starts_empty_and_requests_dumps(
    bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 2)
    await first.stop()
    second = await replicas.start(Settings(reset_states=True))
    assert await covered(bus) == []
    assert second.indexer.snapshotter.covered == 0
    await eventually_overlaps(bus, [1, 2], {"w-1": 2})
    assert worker.dumps == 1


async def test_a_deleted_stream_does_not_revive_its_snapshot(
    bus: Bus, limits: StreamLimits, worker: Publisher, replicas: Replicas
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 1)
    await first.stop()
    await bus.js.context.delete_stream(bus.subjects.kv_stream)
    await ensure_streams(bus, limits)
    second = await replicas.start(Settings())
    assert second.indexer.snapshotter.counts.snapshots_skipped == 1
    await worker.store(500, 501)
    await eventually_overlaps(bus, [500, 501], {"w-1": 2})
    assert await find_overlaps(bus, 1, 2) == {"w-1": 2}


async def rewind(server: NatsServer, bus: Bus, limits: StreamLimits, copy: Path) -> None:
    """Put the KV stream back to what it was; another worker uses its numbers again."""
    await asyncio.to_thread(server.restore, copy, bus.subjects.kv_stream)
    with server.at_another_address() as url:
        other = await Bus.connect(replace(bus.options, url=url), "other")
        await ensure_streams(other, limits)
        before = await last_seq(other)
        await fill(Publisher(other, limits, "x", "x-1"), 700, 30)

        async def stored() -> bool:
            return await last_seq(other) == before + 30

        await eventually(stored)
        await other.close()
    await asyncio.to_thread(server.start)
    await eventually(lambda: bus.connected)
    await ensure_streams(bus, limits)


async def back_up(server: NatsServer, bus: Bus, copy: Path) -> None:
    made = bus.connected_at
    await asyncio.to_thread(server.back_up, copy)
    await eventually(lambda: bus.connected_at > made)


async def test_a_snapshot_of_messages_that_were_rewound_is_dropped_for_one_before_it(
    nats_server: NatsServer,
    bus: Bus,
    limits: StreamLimits,
    worker: Publisher,
    replicas: Replicas,
    tmp_path: Path,
) -> None:
    first = await replicas.start(OFTEN)
    await generations(bus, worker, 1)
    [sound] = await covered(bus)
    await back_up(nats_server, bus, tmp_path / "copy")
    await ensure_streams(bus, limits)
    await generations(bus, worker, 1, start=101)
    await first.stop()
    await rewind(nats_server, bus, limits, tmp_path / "copy")
    second = await replicas.start(Settings())
    assert second.indexer.snapshotter.counts.snapshots_skipped == 1
    assert await covered(bus) == [sound]
    await worker.store(500, 501)
    for start in (1, 101, 500):
        await eventually_overlaps(bus, [start, start + 1], {"w-1": 2})


async def test_a_leader_drops_its_snapshots_of_a_rewound_stream(
    nats_server: NatsServer,
    bus: Bus,
    limits: StreamLimits,
    worker: Publisher,
    replicas: Replicas,
    tmp_path: Path,
) -> None:
    await back_up(nats_server, bus, tmp_path / "copy")
    await ensure_streams(bus, limits)
    leader = (await replicas.start(OFTEN)).indexer
    await generations(bus, worker, 2)
    before = await covered(bus)
    await rewind(nats_server, bus, limits, tmp_path / "copy")
    await eventually(lambda: leader.feed.rewinds == 1)

    async def replaced() -> bool:
        return bool(await covered(bus)) and not set(before) & set(await covered(bus))

    await eventually(replaced)
    await worker.store(500, 501)
    await eventually_overlaps(bus, [1, 2], {"w-1": 2})
    await eventually_overlaps(bus, [500, 501], {"w-1": 2})


async def test_a_replica_without_messages_is_not_ready(
    nats_server: NatsServer, bus: Bus, worker: Publisher, replicas: Replicas
) -> None:
    replica = await replicas.start()
    await worker.store(1, 2)
    await eventually_overlaps(bus, [1, 2], {"w-1": 2})
    await asyncio.to_thread(nats_server.kill)
    await eventually(lambda: not replica.indexer.ready)
    assert replica.indexer.feed.lag > 2
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: replica.indexer.ready)
    await eventually_overlaps(bus, [1, 2], {"w-1": 2})
