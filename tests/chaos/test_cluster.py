"""Faults of one of three NATS servers: every loss of an acknowledged event is detected.

Workers publish through the real publisher; two indexers and a witness read. Once the fault ends,
the index equals the workers' contents, and the witness has read every acknowledged event or reports
it missing from its numbering.
"""

import asyncio
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from support.events import MODEL, Publisher, depths, prompt
from support.indexing import Replicas
from support.nats_cluster import Cluster, Member, is_settled
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import KvBatch, KvEvent, MessageDecoder, OverlapQuery, OverlapReply
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.settings.schema import IndexerSettings as Settings

LIMITS = StreamLimits(
    kv_bytes=64 << 20, route_bytes=1 << 20, seq_bytes=1 << 20, lease_s=10.0, kv_age_s=600.0
)
WORKERS = 3
MOST_BLOCKS = 100
PROGRESS = 60  # events published during the fault
PROMPTS = [tuple(range(first, first + 1 + first % 7)) for first in range(1, 120, 3)]
PAUSE_S = 0.005
SMALL_DISK = 64 << 20


class Worker(Publisher):
    """Stores and evicts at random; numbers and resends its events as a real worker does."""

    def __init__(self, bus: Bus, number: int) -> None:
        super().__init__(bus, LIMITS, f"w{number}", f"w{number}-1")
        subject = bus.subjects.kv(MODEL, self.name)
        self.events = KvPublisher(bus, subject, self.name, self.instance, PAUSE_S, self._dump)
        self._rng = random.Random(number)
        self._working: asyncio.Task[None] | None = None
        self._added = 0

    def _dump(self, rank: int) -> None:
        self._add(self.contents.dump())

    async def publish(self, events: list[KvEvent]) -> None:
        self._add(events)

    def _add(self, events: list[KvEvent]) -> None:
        self._added += len(events)
        self.events.add(self.rank, events)

    async def start(self) -> None:
        await self.open()
        self.events.start()
        self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            events = self.contents.store(self._rng.choice(PROMPTS))
            while len(self.contents.blocks) > MOST_BLOCKS:
                events += self.contents.evict(self._rng.choice)
            await self.publish(events)
            await asyncio.sleep(PAUSE_S)

    async def quiesce(self) -> None:
        """Stop publishing changes; return when every event is acknowledged."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        await eventually(lambda: self.acknowledged == self._added, what=f"{self.name} has sent all")

    @property
    def acknowledged(self) -> int:
        return self.events.published


class Witness:
    """Reads the stream and reports every gap in a rank's numbering."""

    def __init__(self, bus: Bus) -> None:
        self.read: dict[str, set[int]] = {}
        self.reported: dict[str, set[int]] = {}
        self.recreated = 0
        subjects = bus.subjects
        self.reader = StreamReader(
            bus, subjects.kv_stream, subjects.kv_all, self._receive, Start(), self._on_recreated
        )

    def _on_recreated(self) -> None:
        self.recreated += 1

    def _receive(self, message: StreamMessage) -> None:
        batch = msgspec.msgpack.decode(message.data, type=KvBatch)
        read = self.read.setdefault(batch.instance, set())
        reported = self.reported.setdefault(batch.instance, set())
        expected = max(read | reported, default=-1) + 1
        reported.update(range(expected, batch.first))
        read.update(range(batch.first, batch.first + len(batch.events)))

    def accounts_for(self, worker: Worker) -> bool:
        known = self.read.get(worker.instance, set()) | self.reported.get(worker.instance, set())
        return known.issuperset(range(worker.acknowledged))


@dataclass
class Stage:
    cluster: Cluster
    bus: Bus
    workers: list[Worker]
    witness: Witness

    @property
    def stream(self) -> str:
        return self.bus.subjects.kv_stream

    async def leader(self) -> Member:
        return await self.cluster.leader(self.bus, self.stream)

    async def follower(self) -> Member:
        return await self.cluster.follower(self.bus, self.stream)

    async def progress(self) -> None:
        """Wait until the mesh has published more events, fault or not."""
        target = sum(worker.acknowledged for worker in self.workers) + PROGRESS
        await eventually(lambda: sum(w.acknowledged for w in self.workers) >= target)

    async def healed(self) -> None:
        await eventually(
            lambda: is_settled(self.cluster, self.bus, self.stream), what="all replicas are current"
        )

    async def wait_for_correct_index(self) -> None:
        query = OverlapQuery([prompt(blocks) for blocks in PROMPTS])
        await eventually(lambda: self._agree(query), what="the index equals the contents")

    async def _agree(self, query: OverlapQuery) -> bool:
        for _ in range(8):  # each goes to either replica
            try:
                reply = await self.bus.request(
                    self.bus.subjects.index(MODEL), query, MessageDecoder(OverlapReply), 5
                )
            except BusError:
                return False
            for index, blocks in enumerate(PROMPTS):
                held = {w.instance: w.contents.depth(blocks) for w in self.workers}
                assert depths(reply, index) == {w: n for w, n in held.items() if n}, blocks
        return True


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        cluster = Cluster(tmp_path)
        stack.callback(cluster.stop)
        await asyncio.to_thread(cluster.start)
        options = BusOptions(url=cluster.url, namespace="c", replicas=3)
        bus = await Bus.connect(options, "test")
        stack.push_async_callback(bus.close)
        await eventually(lambda: streams_created(bus), what="the streams exist")
        workers, witness = [], Witness(bus)
        await witness.reader.open()
        stack.push_async_callback(witness.reader.close)
        for number in range(WORKERS):
            own = await Bus.connect(options, f"w{number}")
            stack.push_async_callback(own.close)
            workers.append(Worker(own, number))
            await workers[-1].start()
            stack.push_async_callback(workers[-1].close)
            stack.push_async_callback(workers[-1].events.close)
        replicas = Replicas(options, LIMITS, stack)
        for _ in range(2):
            await replicas.start(Settings(snapshot_threshold=200))
        yield Stage(cluster, bus, workers, witness)


async def streams_created(bus: Bus) -> bool:
    try:
        return await ensure_streams(bus, LIMITS) == []
    except BusError as error:
        raise AssertionError(f"not yet: {error!r}") from error


async def kill_the_leader(stage: Stage) -> None:
    leader = await stage.leader()
    leader.kill()
    await stage.progress()
    await asyncio.to_thread(leader.start)


async def freeze_the_leader(stage: Stage) -> None:
    leader = await stage.leader()
    leader.freeze()
    await stage.progress()
    leader.thaw()


async def restore_an_older_store_of_the_leader(stage: Stage) -> None:
    leader = await stage.leader()
    copy = leader.store / "copy"
    await asyncio.to_thread(leader.back_up, copy)
    await stage.healed()
    await stage.progress()
    await asyncio.to_thread(leader.restore, copy)
    await stage.progress()
    await asyncio.to_thread(leader.start)


async def isolate_the_leader(stage: Stage) -> None:
    leader = await stage.leader()
    await asyncio.to_thread(leader.isolate)
    await stage.progress()
    await asyncio.to_thread(leader.rejoin)


async def flip_bytes_of_a_follower(stage: Stage) -> None:
    follower = await stage.follower()
    follower.kill()
    files = list(follower.blocks(stage.stream))
    assert files
    rng = random.Random(1)
    for file in files:
        data = bytearray(file.read_bytes())
        for _ in range(min(len(data), 20)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    await stage.progress()
    await asyncio.to_thread(follower.start)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One member's store is on a small file system of its own."""
    folder = tmp_path / "n0"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a small disk: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


async def fill_the_disk(stage: Stage) -> None:
    """Fill the disk of one server, leader or not, and free it later."""
    member = stage.cluster.members[0]
    ballast = member.store / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        for _ in range(SMALL_DISK >> 16):
            file.write(bytes(1 << 16))
            file.flush()
    await stage.progress()
    ballast.unlink()
    member.kill()  # a failed writer stays failed until a restart
    await asyncio.to_thread(member.start)


async def check_property(stage: Stage, fault: Callable[[Stage], Awaitable[None]]) -> None:
    """Check the property: inject a fault, heal, and compare."""
    await stage.progress()
    await fault(stage)
    await stage.healed()
    await stage.progress()
    for worker in stage.workers:
        await worker.quiesce()
    await eventually(lambda: all(map(stage.witness.accounts_for, stage.workers)))
    await stage.wait_for_correct_index()


@pytest.mark.parametrize(
    "fault", [kill_the_leader, freeze_the_leader, restore_an_older_store_of_the_leader]
)
async def test_acknowledged_events_are_read_or_reported_after(
    stage: Stage, fault: Callable[[Stage], Awaitable[None]]
) -> None:
    await check_property(stage, fault)


@pytest.mark.soak
@pytest.mark.parametrize("fault", [isolate_the_leader, flip_bytes_of_a_follower])
async def test_acknowledged_events_are_read_or_reported_after_much(
    stage: Stage, fault: Callable[[Stage], Awaitable[None]]
) -> None:
    for _ in range(3):
        await stage.progress()
        await fault(stage)
        await stage.healed()
    await check_property(stage, fault)


@pytest.mark.soak
async def test_acknowledged_events_are_read_or_reported_after_a_full_disk(
    small_disk: Path, stage: Stage
) -> None:
    await check_property(stage, fill_the_disk)
