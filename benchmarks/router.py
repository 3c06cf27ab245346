"""The router: one decision in the core, and over the bus.

Core: workers hold prefixes of 40 prompt families (64–256 shared blocks, skewed popularity) and run
8 requests each; a decision covers overlaps, active blocks, cost, choice and its explanation of the
best 16 candidates. Bus: one router process, an index that answers at once in this process, and
requests from this process; CPU time is the router's alone, from /proc.
"""

import argparse
import asyncio
import gc
import os
import secrets
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import uvloop
from common import Report, cpu_seconds, median, parser, percentile

from kvmesh.bus.client import Bus, BusOptions, returning
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import NoResponder
from kvmesh.bus.messages import (
    Capacity,
    Instance,
    MessageDecoder,
    ModelCard,
    OverlapQuery,
    OverlapReply,
    RankKey,
    Refused,
    Role,
    Routed,
    RouteReply,
    RouteRequest,
    SeqAdd,
    SeqBatch,
    SeqFree,
    encode,
)
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.router.waiting.queue import PlacementQueue
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

BLOCK = 16
FAMILIES = 40
MODEL = "bench"
_replies: MessageDecoder[Routed | Refused] = MessageDecoder(RouteReply)
_raw = MessageDecoder(msgspec.Raw)
SERVER = Path(sys.executable).with_name("nats-server")


def worker(number: int) -> Instance:
    return Instance(
        instance=f"worker-{number}-{number:08x}",
        role=Role.WORKER,
        name=f"worker-{number}",
        version="0",
        started=0.0,
        model=ModelCard(name=MODEL, context=1 << 20, block_size=BLOCK, files=""),
        capacity=Capacity(blocks=1 << 20, max_sequences=256, max_batched_tokens=8192),
    )


class Prompts:
    """Prompts of 40 families: a shared prefix, then blocks of their own."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._families = [rng.randbytes(8 * rng.randint(64, 256)) for _ in range(FAMILIES)]

    def sequence(self, blocks: int) -> bytes:
        family = self._families[min(int(self._rng.expovariate(0.15)), FAMILIES - 1)]
        own = max(blocks - len(family) // 8, 0)
        return family[: 8 * blocks] + self._rng.randbytes(8 * own)

    def request(self, name: str, blocks: int) -> RouteRequest:
        return RouteRequest(
            request=name,
            model=MODEL,
            sequence_hashes=self.sequence(blocks),
            tokens=blocks * BLOCK + 5,
            max_tokens=200,
            deadline_s=60.0,
        )


def overlaps(workers: int, blocks: int, holders: int, rng: Random) -> Overlaps:
    """A reply of the index: that many workers hold some of the prompt."""
    ranks = [RankKey(worker(n).instance, 0) for n in sorted(rng.sample(range(workers), holders))]
    rows = (struct.pack("<5I", n, rng.randint(1, blocks), 0, 0, 0) for n in range(holders))
    return Overlaps(ranks, b"".join(rows))


def loaded_core(workers: int, prompts: Prompts, active: int, **settings: object) -> RouterCore:
    """A core whose workers run `active` requests each."""
    options: dict[str, object] = {"queue_threshold": 0.0, **settings}
    core = RouterCore(MODEL, "r", RouterSettings(**options), Random(1))  # type: ignore[arg-type]
    for number in range(workers):
        core.join(worker(number))
    for number in range(workers):
        to = worker(number).instance
        for turn in range(active):
            tokens = 512 * BLOCK + 5
            core.apply(
                SeqAdd(f"load-{number}-{turn}", to, 0, prompts.sequence(512), tokens, 0, 0, 0.0),
                0.0,
            )
    return core


def decisions(core: RouterCore, prompts: Prompts, answers: list[Overlaps]) -> Iterator[float]:
    """Seconds of single decisions; placing, freeing and forgetting them is not measured."""
    for turn in range(1500):
        message = prompts.request(f"q{turn}", 512)
        answer = answers[turn % len(answers)]
        started = time.perf_counter()
        decision = core.decide(message, answer, 1.0)
        yield time.perf_counter() - started
        core.commit(decision, 1.0)
        core.apply(SeqFree(message.request), 1.0)
        core.expire(100.0)


def microseconds(
    workers: int, share: float, active: int = 8, answers: int = 1, **settings: object
) -> list[float]:
    """Median decision time, three times, in microseconds."""
    rng = Random(workers)
    prompts = Prompts(rng)
    core = loaded_core(workers, prompts, active, **settings)
    given = [overlaps(workers, 512, int(workers * share), rng) for _ in range(answers)]
    gc.collect()
    gc.disable()
    runs = [median(decisions(core, prompts, given)) * 1e6 for _ in range(3)]
    gc.enable()
    return runs


def placements(core: RouterCore, prompts: Prompts, answer: Overlaps) -> Iterator[float]:
    """Seconds of whole placements: decision, queue check, and the ledger of active requests."""
    dispatcher = PlacementQueue(core, "r")
    for turn in range(1500):
        ticket = Ticket(prompts.request(f"q{turn}", 512), 1.0, answer)
        started = time.perf_counter()
        dispatcher.submit(ticket, 1.0)
        dispatcher.place_gathered(1.0)
        yield time.perf_counter() - started
        dispatcher.apply(SeqFree(ticket.request.request), 1.0)
        core.expire(100.0)


def whole_placement(workers: int) -> list[float]:
    """Median time of a placement, three times, in microseconds."""
    rng = Random(workers)
    prompts = Prompts(rng)
    core = loaded_core(workers, prompts, 8, queue_threshold=100.0)
    answer = overlaps(workers, 512, workers, rng)
    return [median(placements(core, prompts, answer)) * 1e6 for _ in range(3)]


def bench_core(report: Report) -> float:
    rows = (
        ("64 workers, 512 blocks, 28 % hold some", 64, 0.28, 8, "50"),
        ("64 workers, all hold some", 64, 1.0, 8, "50"),
        ("64 workers, idle and cold", 64, 0.0, 0, ""),
        ("256 workers, all hold some", 256, 1.0, 8, ""),
        ("1,000 workers, 28 % hold some", 1000, 0.28, 8, "300"),
        ("1,000 workers, all hold some", 1000, 1.0, 8, "300"),
        ("4,000 workers, all hold some", 4000, 1.0, 2, ""),
    )
    found = {}
    for name, workers, share, active, target in rows:
        found[name] = microseconds(workers, share, active)
        report.add_runs(f"decision: {name}", found[name], "µs", target=target and f"≤ {target}")
    fresh = microseconds(1000, 1.0, answers=50)
    report.add_runs("decision: 1,000 workers, other holders each time", fresh, "µs", target="≤ 300")
    busy = microseconds(64, 1.0, predicted_ttl_s=0.0)
    report.add_runs("decision: 64 workers, nothing predicted", busy, "µs")
    whole = {workers: whole_placement(workers) for workers in (64, 1000, 7000)}
    for workers, runs in whole.items():
        name = f"placement: {workers:,} workers, all hold some, decided, checked and counted"
        report.add_runs(name, runs, "µs")
        if workers > 64:
            growth, more = median(runs) / median(whole[64]), workers / 64
            report.add(f"… over that with 64 ({more:.1f} times as many)", growth, "×")
    return median(found[rows[1][0]])


# --- over the bus


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    port = 20000 + os.getpid() % 20000
    process = subprocess.Popen(
        [SERVER, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", folder / "js"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return process, f"nats://127.0.0.1:{port}"


def start_router(url: str, namespace: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "KVMESH_NATS_URL": url,
        "KVMESH_NATS_NAMESPACE": namespace,
        "KVMESH_LOG_LEVEL": "warning",
    }
    return subprocess.Popen([sys.executable, "-m", "kvmesh.cli.main", "router"], env=environment)


async def serve_index(bus: Bus, workers: int) -> None:
    """An index with one constant reply."""
    rng = Random(3)
    answer = overlaps(workers, 128, workers // 3 + 1, rng)

    def find(query: OverlapQuery) -> OverlapReply:
        return OverlapReply(answer.ranks, [answer.rows] * len(query.prompts))

    decoder = MessageDecoder(OverlapQuery)
    await bus.serve(bus.subjects.index(MODEL), decoder, returning(find), on_malformed=str)


class Clients:
    """Sends route requests and frees the placed ones."""

    def __init__(self, bus: Bus, prompts: Prompts) -> None:
        self._bus = bus
        self._prompts = prompts
        self._sent = 0

    async def one(self) -> float:
        """Seconds of one placement."""
        self._sent += 1
        name = f"q{self._sent}"
        message = self._prompts.request(name, 128)
        subject = self._bus.subjects.router(MODEL)
        started = time.perf_counter()
        reply = await self._bus.request(subject, message, _raw, 5)
        took = time.perf_counter() - started
        routed = _replies.decode(bytes(reply))
        if isinstance(routed, Refused):
            raise RuntimeError(routed.reason)
        self._bus.post(self._bus.subjects.seq(MODEL), SeqBatch("bench", [SeqFree(name)]))
        return took

    async def many(self, count: int, at_once: int) -> list[float]:
        """`count` placements, `at_once` in flight."""
        left = iter(range(count))

        async def lane() -> list[float]:
            return [await self.one() for _ in left]

        lanes = await asyncio.gather(*(lane() for _ in range(at_once)))
        return [seconds for lane_times in lanes for seconds in lane_times]

    async def paced(self, count: int, pause: float) -> list[float]:
        """`count` placements, each followed by a pause for its deferred work."""
        times = []
        for _ in range(count):
            times.append(await self.one())
            await asyncio.sleep(pause)
        return times

    async def bare(self, count: int) -> tuple[list[float], list[float]]:
        """Seconds of empty round trips: to the router, and to the index."""
        empty = RouteRequest(
            request="", model=MODEL, sequence_hashes=b"", tokens=0, max_tokens=1, deadline_s=1.0
        )
        subjects = self._bus.subjects
        router = await self._trips(subjects.router(MODEL), encode(empty), count)
        return router, await self._trips(subjects.index(MODEL), encode(OverlapQuery([])), count)

    async def _trips(self, subject: str, message: bytes, count: int) -> list[float]:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            await self._bus.request(subject, msgspec.Raw(message), _raw, 5)
            times.append(time.perf_counter() - started)
        return times


async def bench_bus(report: Report, workers: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_server(Path(folder))
        namespace = f"b{secrets.token_hex(4)}"
        bus = await Bus.connect(BusOptions(url=url, namespace=namespace), "bench")
        router = start_router(url, namespace)
        try:
            return await _measure(report, bus, router.pid, workers)
        finally:
            router.terminate()
            router.wait(10)
            await bus.close()
            server.terminate()
            server.wait(10)


async def _measure(report: Report, bus: Bus, router: int, workers: int) -> tuple[float, float]:
    limits = StreamLimits(lease_s=30.0)
    await ensure_streams(bus, limits)
    leases = [Lease(bus, worker(number), limits) for number in range(workers)]
    for lease in leases:
        await lease.open()
    await serve_index(bus, workers)
    clients = Clients(bus, Prompts(Random(5)))
    await _warm_up(clients)
    trips = [median(times) * 1e3 for times in await clients.bare(2000)]
    report.add("the bus alone: request to the router and refusal, p50", trips[0], "ms")
    report.add("the bus alone: empty query to the index and answer, p50", trips[1], "ms")
    paced = await clients.paced(1000, 0.004)
    p50, p99 = median(paced) * 1e3, percentile(paced, 0.99) * 1e3
    report.add(f"over the bus, {workers} workers, one every 4 ms: p50", p50, "ms", "0.125", "≤ 0.3")
    report.add(f"over the bus, {workers} workers, one every 4 ms: p99", p99, "ms")
    alone = median(await clients.many(2000, 1)) * 1e3
    report.add(f"over the bus, {workers} workers, one after the other: p50", alone, "ms")
    cpu, wall, count = cpu_seconds(router), time.perf_counter(), 12_000
    await clients.many(count, 64)
    wall, cpu = time.perf_counter() - wall, cpu_seconds(router) - cpu
    report.add(
        f"over the bus, {workers} workers, 64 in flight: router CPU", cpu / count * 1e6, "µs"
    )
    rate = count / cpu
    report.add("decisions per second of router CPU", rate, "/s", target="≥ 3,000")
    report.add("decisions per second of wall time, clients on the same machine", count / wall, "/s")
    for lease in leases:
        await lease.close()
    return p50, rate


async def _warm_up(clients: Clients) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            await clients.one()
            break
        except NoResponder:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
    await clients.many(500, 8)


def main() -> None:
    arguments: argparse.Namespace = parser(__doc__ or "").parse_args()
    report = Report("router", baseline_name="Dynamo 1.6.1")
    core = bench_core(report)
    p50, rate = uvloop.run(bench_bus(report, 64))
    report.finish(
        f"router: {core:.0f} µs per decision in the core (64 workers, 512 blocks), "
        f"{p50:.2f} ms over the bus with the index, {rate:,.0f} decisions per CPU second",
        arguments.json,
    )


if __name__ == "__main__":
    main()
