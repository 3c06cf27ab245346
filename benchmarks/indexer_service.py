"""The indexer through NATS: events and queries per second, time to visibility, warm restart.

One NATS server and one `kvmesh indexer` process; this process plays the workers and the routers.
Beside each figure stands what the bus alone does on the same work in the same run: a reader that
only counts, a service that only echoes, the object store's own `get`.
"""

import asyncio
import multiprocessing
import random
import re
import tempfile
import time
from array import array
from pathlib import Path

import uvloop
from common import Report, parser, percentile
from indexer_stage import EVENT_BLOCKS, MODEL, SALT, Fleet, Indexer, Server, connect, patiently

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.messages import (
    KvEvent,
    MessageDecoder,
    OverlapQuery,
    OverlapReply,
)
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.hashing import sequence_hashes
from kvmesh.indexer.snapshots.snapshot_store import SnapshotStore

OVERLAP_REPLY = MessageDecoder(OverlapReply)

IN_FLIGHT = 64
QUERY_S = 4.0
VISIBLE_S = 10.0
PLAIN_BLOCKS = 1_000_000  # above, nats-py's `get` takes minutes
RATE = 20_000  # blocks per second
BATCH_S = 0.003


# --- events


async def count_messages(bus: Bus, expected: int) -> float:
    """Seconds of a reader that only counts the messages: the bus alone."""
    done = asyncio.Event()

    def take(message: StreamMessage) -> None:
        if message.seq >= expected:
            done.set()

    subjects = bus.subjects
    reader = StreamReader(bus, subjects.kv_stream, subjects.kv_all, take, Start())
    started = time.perf_counter()
    await reader.open()
    await done.wait()
    seconds = time.perf_counter() - started
    await reader.close()
    return seconds


async def events(server: Server, folder: Path, report: Report, messages: int, per: int) -> float:
    """Replay a stored stream whose messages carry `per` store events of 32 blocks, and removals."""
    name = f"events{per}"
    bus = await connect(server, name)
    async with Fleet(bus, 16) as fleet:
        events_ = blocks = 0
        for i in range(messages):
            worker = fleet.workers[i % 16]
            batch = [event for _ in range(per) for event in worker.turnover(keep=64)]
            events_ += len(batch)
            blocks += EVENT_BLOCKS * len(batch)
            await fleet.publish(worker, worker.batch(batch))
        await fleet.stored(messages)
        bare = await count_messages(bus, messages)
        indexer = Indexer(server, name, folder)
        await indexer.reaches("messages_total", 1)
        begun, cpu = time.perf_counter(), indexer.cpu_s
        seen = indexer.metric("messages_total")
        await indexer.reaches("messages_total", messages)
        seconds, used = time.perf_counter() - begun, indexer.cpu_s - cpu
        share = (messages - seen) / messages
        indexer.kill()
    await bus.close()
    rate = events_ * share / seconds
    limit = f"{events_ / bare:,.0f} (counting)"
    report.add(f"events of {EVENT_BLOCKS} blocks, {2 * per} a message", rate, "events/s", limit)
    report.add("… blocks", blocks * share / seconds, "blocks/s", f"{blocks / bare:,.0f}")
    report.add("… indexer CPU", used / (events_ * share) * 1e6, "µs/event")
    return rate


# --- queries


def family_prompts(rng: random.Random, workers: int) -> list[list[bytes]]:
    """Per worker, 2,000 blocks: shared prefixes of 64–256, private suffixes of 128–384."""
    prefixes = [rng.randbytes(8 * rng.randint(64, 256)) for _ in range(40)]
    weights = [1 / (i + 1) for i in range(40)]
    fleet = []
    for _ in range(workers):
        prompts: list[bytes] = []
        while sum(map(len, prompts)) < 8 * 2000:
            prefix = rng.choices(prefixes, weights)[0]
            prompts.append(prefix + rng.randbytes(8 * rng.randint(128, 384)))
        fleet.append(prompts)
    return fleet


def echo(url: str, subject: str) -> None:
    """A service with the same small reply to every query: the bus alone."""

    async def run() -> None:
        bus = await Bus.connect(BusOptions(url=url), "echo")
        same = OverlapReply([], [bytes(20)])

        async def answer(_: OverlapQuery, reply: Reply) -> None:
            reply(same)

        await bus.serve(subject, MessageDecoder(OverlapQuery), answer)
        await asyncio.Event().wait()

    uvloop.run(run())


async def query_rate(
    bus: Bus, subject: str, queries: list[OverlapQuery]
) -> tuple[float, float, float]:
    """Queries per second at 64 in flight, then the p50 and p99 one at a time, in milliseconds."""
    done = 0
    until = time.perf_counter() + QUERY_S

    async def client(number: int) -> None:
        nonlocal done
        i = number
        while time.perf_counter() < until:
            await bus.request(subject, queries[i % len(queries)], OVERLAP_REPLY, 5)
            i += 1
            done += 1

    await asyncio.gather(*(client(n) for n in range(IN_FLIGHT)))
    alone = []
    for query in queries[:1000]:
        started = time.perf_counter()
        await bus.request(subject, query, OVERLAP_REPLY, 5)
        alone.append((time.perf_counter() - started) * 1e3)
    return done / QUERY_S, percentile(alone, 0.5), percentile(alone, 0.99)


async def queries(server: Server, folder: Path, report: Report) -> float:
    bus = await connect(server, "queries")
    rng = random.Random(3)
    async with Fleet(bus, 64) as fleet:
        prompts = family_prompts(rng, 64)
        for worker, held in zip(fleet.workers, prompts, strict=True):
            await fleet.publish(worker, worker.batch([worker.stored(local) for local in held]))
        await fleet.stored(64)
        indexer = Indexer(server, "queries", folder)
        await indexer.reaches("ready", 1)
        every = [sequence_hashes(local, SALT) for held in prompts for local in held]
        asked = [OverlapQuery([rng.choice(every)[: 8 * 128]]) for _ in range(2000)]
        cpu, before = indexer.cpu_s, indexer.metric("queries_total")
        rate, p50, p99 = await query_rate(bus, bus.subjects.index(MODEL), asked)
        used = (indexer.cpu_s - cpu) / (indexer.metric("queries_total") - before)
        batched = [OverlapQuery(rng.choices(every, k=16)) for _ in range(200)]
        many, _, _ = await query_rate(bus, bus.subjects.index(MODEL), batched)
        indexer.kill()
        bare = await echo_rate(bus, server, asked)
    await bus.close()
    report.add("queries, 128 blocks, 64 in flight", rate, "queries/s", f"{bare[0]:,.0f} (echo)")
    report.add("… indexer CPU", used * 1e6, "µs/query")
    report.add("… one at a time, p50", p50, "ms", f"{bare[1]:.2f} (echo)")
    report.add("… one at a time, p99", p99, "ms", f"{bare[2]:.2f} (echo)")
    report.add("prompts, 16 per query", many * 16, "prompts/s")
    return rate


async def echo_rate(
    bus: Bus, server: Server, asked: list[OverlapQuery]
) -> tuple[float, float, float]:
    subject = "bench.echo"
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(server.url, subject))
    process.start()
    try:
        await patiently(lambda: bus.request(subject, asked[0], OVERLAP_REPLY, 1))
        return await query_rate(bus, subject, asked)
    finally:
        process.kill()
        process.join()


# --- visibility


async def visibility(server: Server, folder: Path, report: Report) -> float:
    """Time from a worker's publish to the first reply that includes it, at 20 K blocks/s."""
    bus = await connect(server, "visible")
    async with Fleet(bus, 4) as fleet:
        indexer = Indexer(server, "visible", folder)
        await indexer.reaches("ready", 1)
        per_batch = round(RATE * BATCH_S / len(fleet.workers))
        traffic = asyncio.create_task(_traffic(fleet, per_batch))
        arrivals = Arrivals(bus)
        await arrivals.reader.open()
        delays, bare, cpu = [], [], indexer.cpu_s
        begun = time.perf_counter()
        while time.perf_counter() < begun + VISIBLE_S:
            delays.append(await _until_visible(bus, fleet) * 1e3)
            bare.append(await arrivals.delay(fleet) * 1e3)
            await asyncio.sleep(0.02)
        await arrivals.reader.close()
        busy = (indexer.cpu_s - cpu) / (time.perf_counter() - begun)
        traffic.cancel()
        indexer.kill()
    await bus.close()
    for share, target in ((0.5, "≤ 5"), (0.99, "≤ 20")):
        limit = f"{percentile(bare, share):.2f} (delivery)"
        name = f"published → visible, 20 K blocks/s, p{share * 100:.0f}"
        report.add(name, percentile(delays, share), "ms", limit, target, f"{len(delays)} samples")
    report.add("… indexer CPU", busy * 100, "% of a core")
    return percentile(delays, 0.5)


class Arrivals:
    """A reader of the same stream in this process: delivery of a message, without an index."""

    def __init__(self, bus: Bus) -> None:
        subjects = bus.subjects
        start = Start(new=True)
        self.reader = StreamReader(bus, subjects.kv_stream, subjects.kv_all, self._take, start)
        self._awaited = b""
        self._arrived = asyncio.Event()

    def _take(self, message: StreamMessage) -> None:
        if message.data == self._awaited:
            self._arrived.set()

    async def delay(self, fleet: Fleet) -> float:
        worker = fleet.workers[0]
        self._awaited = worker.batch([worker.stored(random.randbytes(8))])
        self._arrived.clear()
        started = time.perf_counter()
        await fleet.publish(worker, self._awaited)
        await self._arrived.wait()
        return time.perf_counter() - started


async def _traffic(fleet: Fleet, blocks: int) -> None:
    """Every worker publishes a batch every 3 ms, as workers gather events."""
    due = time.perf_counter()
    while True:
        for worker in fleet.workers:
            local = worker.rng.randbytes(8 * blocks)
            await fleet.publish(worker, worker.batch([worker.stored(local)]))
        due += BATCH_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def _until_visible(bus: Bus, fleet: Fleet) -> float:
    worker = fleet.workers[0]
    local = array("Q", [random.getrandbits(64)]).tobytes()
    query = OverlapQuery([sequence_hashes(local, SALT)])
    started = time.perf_counter()
    await fleet.publish(worker, worker.batch([worker.stored(local)]))
    while True:
        reply = await bus.request(bus.subjects.index(MODEL), query, OVERLAP_REPLY, 5)
        if reply.rows[0]:
            return time.perf_counter() - started


# --- warm restart


async def restart(server: Server, folder: Path, report: Report, blocks: int, target: str) -> float:
    """kill -9, start again: time from the new process's start to its first right reply."""
    name = f"restart{blocks}"
    bus = await connect(server, name)
    store = SnapshotStore(bus)
    async with Fleet(bus, 8) as fleet:
        messages = blocks // (4 * 250)
        indexer = Indexer(server, name, folder, "--snapshot-threshold", str(messages))
        await indexer.reaches("ready", 1)
        for i in range(messages):
            worker = fleet.workers[i % 8]
            batch: list[KvEvent] = [worker.stored(worker.rng.randbytes(2000)) for _ in range(4)]
            await fleet.publish(worker, worker.batch(batch))
        await indexer.reaches("snapshots_total", 1)
        local = random.randbytes(8 * 10)
        worker = fleet.workers[0]
        await fleet.publish(worker, worker.batch([worker.stored(local)]))
        await indexer.reaches("applied_seq", messages + 1)
        indexer.kill()
        slot = (await store.slots("whole"))[0]
        plain = await _plain_get(bus, slot.name) if blocks <= PLAIN_BLOCKS else None
        seconds = []
        for _ in range(3):
            again = Indexer(server, name, folder)
            seconds.append(await _until_right(bus, again, local, worker.instance))
            restored = float(re.findall(r"in ([\d.]+) s", again.log.read_text())[0])
            again.kill()
    await bus.close()
    report.add_runs(f"warm restart, {blocks:,} blocks", seconds, "s", "", target)
    alone = f"{plain:.2f} (get)" if plain is not None else ""
    report.add("… snapshot read and loaded", restored, "s", alone)
    report.add("… snapshot size", slot.size / blocks, "bytes/block", "16 (two hashes)")
    return percentile(seconds, 0.5)


async def _plain_get(bus: Bus, name: str) -> float:
    """Seconds of nats-py's own object-store `get` for the same snapshot."""
    bucket = await bus.js.object_store(bus.subjects.index_bucket)
    started = time.perf_counter()
    await bucket.get(name)
    return time.perf_counter() - started


async def _until_right(bus: Bus, indexer: Indexer, local: bytes, instance: str) -> float:
    query = OverlapQuery([sequence_hashes(local, SALT)])

    async def attempt() -> None:
        reply = await bus.request(bus.subjects.index(MODEL), query, OVERLAP_REPLY, 1)
        if [rank.instance for rank in reply.ranks] != [instance]:
            raise RuntimeError(f"wrong answer after a restart: {reply}")

    await patiently(attempt)
    return time.perf_counter() - indexer.started


async def run(folder: Path, quick: bool) -> tuple[Report, str]:
    report = Report("Indexer service through NATS", "bus alone")
    server = Server(folder)
    scale = 10 if quick else 1
    try:
        small = await events(server, folder, report, 60_000 // scale, 1)
        large = await events(server, folder, report, 10_000 // scale, 8)
        asked = await queries(server, folder, report)
        visible = await visibility(server, folder, report)
        warm = await restart(server, folder, report, 1_000_000 // scale, "≤ 3")
        await restart(server, folder, report, 10_000_000 // scale, "≤ 5")
    finally:
        server.process.kill()
        server.process.wait()
    summary = (
        f"indexer: {small:,.0f}–{large:,.0f} events/s, {asked:,.0f} queries/s, "
        f"visible after {visible:.1f} ms, warm restart in {warm:.1f} s"
    )
    return report, summary


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="a tenth of the work")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        report, summary = uvloop.run(run(Path(folder), options.quick))
    report.finish(summary, options.json)


if __name__ == "__main__":
    main()
