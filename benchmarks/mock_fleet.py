"""Mock engines per core: whole workers in one process, in real time, on the bus.

Three processes: a NATS server, the fleet (every worker with its lease, subjects, KV events, load
and tokens), and a client in the frontend's role: it sends requests at a steady rate per engine and
checks that every token arrives. Only the fleet's CPU time counts. Then the core alone, in virtual
time, without a bus.
"""

import asyncio
import itertools
import multiprocessing
import os
import subprocess
import tempfile
import time
from array import array
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import msgspec
import uvloop
from common import Report, cpu_seconds, parser, percentile, rss_bytes
from local_mesh import NATS_SERVER, free_port

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import MessageDecoder, Sampling, StepOutput, Work, WorkReply
from kvmesh.bus.storage.model_files import publish_model
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.demo import model_dir
from kvmesh.settings import Settings
from kvmesh.settings.schema import MockSettings, WorkerSettings
from kvmesh.worker.enginecore.sequence import Request, hash_prompt
from kvmesh.worker.engines.mock.core import CoreOptions, MockCore
from kvmesh.worker.engines.mock.text.source import TextReading, TextSource
from kvmesh.worker.lives.further_engines import FurtherEngines

LIMITS = StreamLimits(lease_s=30.0)
PROMPT, SHARED, OUTPUT = 1024, 768, 128
LAG_S = 0.01
WARM_UP_S = 3.0
FRONTEND = "bench"
step_decoder = MessageDecoder(StepOutput)


@dataclass(frozen=True)
class Plan:
    """One run: number of engines, requests per second to each, and the horizon of a step call."""

    engines: int
    rate: float
    seconds: float
    tick_s: float
    blocks: int


class Usage(msgspec.Struct, array_like=True):
    """Counters of the fleet at one moment."""

    at: float
    cpu_s: float
    rss: int
    steps: int
    tokens: int
    events: int


# --- the fleet ---------------------------------------------------------------------------------


class Fleet:
    """Workers that share one connection."""

    def __init__(self, bus: Bus, plan: Plan) -> None:
        mock = MockSettings(blocks=plan.blocks, tick_s=plan.tick_s)
        settings = Settings(mock=mock, worker=WorkerSettings(load_interval_s=1.0))
        self._engines = FurtherEngines(bus, settings, model_dir(), "w", plan.engines, LIMITS)
        self._nodes = list(self._engines.nodes.values())
        self.instances = [node.instance for node in self._nodes]
        self.lags: list[float] = []

    async def start(self, bus: Bus) -> None:
        await self._engines.start(await publish_model(bus, model_dir()))

    async def close(self) -> None:
        await self._engines.close(0.0)

    def usage(self) -> Usage:
        loads = [load for node in self._nodes for load in node.load()]
        return Usage(
            time.monotonic(),
            cpu_seconds(os.getpid()),
            rss_bytes(os.getpid()),
            sum(load.steps for load in loads),
            sum(load.output_tokens for load in loads),
            sum(node.events_published for node in self._nodes),
        )

    async def watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LAG_S)
            self.lags.append(loop.time() - before - LAG_S)


def run_fleet(url: str, plan: Plan, pipe: Connection) -> None:
    uvloop.run(_fleet(url, plan, pipe))


async def _fleet(url: str, plan: Plan, pipe: Connection) -> None:
    """Reply to each message on the pipe with the usage so far; end on an empty one."""
    before = rss_bytes(os.getpid())
    bus = await Bus.connect(BusOptions(url=url), "fleet")
    await ensure_streams(bus, LIMITS)
    fleet = Fleet(bus, plan)
    await fleet.start(bus)
    lag = asyncio.create_task(fleet.watch_lag())
    pipe.send((before, rss_bytes(os.getpid()), fleet.instances))
    while await asyncio.to_thread(pipe.recv):
        pipe.send((fleet.usage(), fleet.lags))
        fleet.lags = []
    lag.cancel()
    await fleet.close()
    await bus.close()


# --- the client --------------------------------------------------------------------------------


@dataclass
class Client:
    """Sends requests and follows their tokens."""

    bus: Bus
    plan: Plan
    instances: list[str]
    sent: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    paces: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    rng: Random = field(default_factory=lambda: Random(7))
    done: int = 0
    faults: int = 0

    async def open(self) -> None:
        subject = self.bus.subjects.out(FRONTEND)
        await self.bus.subscribe(subject, step_decoder, self._receive)

    async def _receive(self, output: StepOutput) -> None:
        now = time.monotonic()
        for chunk in output.chunks:
            name = chunk.request
            have = self.count.get(name, 0)
            self.faults += chunk.offset != have
            self.count[name] = have + len(chunk.tokens)
            if not have:
                self.first[name] = now
                self.ttfts.append(now - self.sent[name])
            if chunk.finish is not None:
                self.done += 1
                self.faults += self.count[name] != OUTPUT or chunk.finish != "length"
                self.paces.append((now - self.first[name]) / (OUTPUT - len(chunk.tokens) or 1))

    async def send(self, name: str, engine: int, tokens: bytes) -> None:
        work = Work(
            request=name, frontend=FRONTEND, tokens=tokens, sampling=Sampling(max_tokens=OUTPUT)
        )
        self.sent[name] = time.monotonic()
        reply = await self.bus.request(
            self.bus.subjects.work(self.instances[engine]), work, MessageDecoder(WorkReply), 10
        )
        self.faults += reply.status != "accepted"

    async def load(self, seconds: float, names: "itertools.count[int]") -> None:
        """Requests at the plan's rate, engines in a random order."""
        rng, tasks = self.rng, []
        start = time.monotonic()
        total = int(self.plan.engines * self.plan.rate * seconds)
        shared = list(range(SHARED))
        for i in range(total):
            await asyncio.sleep(start + i * seconds / total - time.monotonic())
            own = [rng.randrange(8000) for _ in range(PROMPT - SHARED)]
            tokens = array("I", [*shared, *own]).tobytes()
            engine = rng.randrange(self.plan.engines)
            tasks.append(asyncio.create_task(self.send(f"r{next(names)}", engine, tokens)))
        await asyncio.gather(*tasks)


@dataclass
class Outcome:
    """Results of a run; memory in bytes."""

    before: Usage
    after: Usage
    lags: list[float]
    idle_bytes: float
    client: Client

    def per_second(self, field_name: str) -> float:
        change = getattr(self.after, field_name) - getattr(self.before, field_name)
        return float(change / (self.after.at - self.before.at))


async def measure_fleet(url: str, plan: Plan) -> Outcome:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_fleet, args=(url, plan, there))
    process.start()
    there.close()  # if the fleet fails, `recv` raises EOFError
    base, started, instances = await asyncio.to_thread(here.recv)
    bus = await Bus.connect(BusOptions(url=url), "client")
    client = Client(bus, plan, instances)
    await client.open()
    names = itertools.count()
    await client.load(WARM_UP_S, names)
    before, _ = await _ask(here)
    client.ttfts.clear()
    client.paces.clear()
    await client.load(plan.seconds, names)
    after, lags = await _ask(here)
    deadline = time.monotonic() + 30
    while client.done < len(client.sent) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    client.faults += len(client.sent) - client.done
    here.send(False)
    await asyncio.to_thread(process.join, 30)
    await bus.close()
    return Outcome(before, after, lags, (started - base) / plan.engines, client)


async def _ask(pipe: Connection) -> tuple[Usage, list[float]]:
    pipe.send(True)
    answer: tuple[Usage, list[float]] = await asyncio.to_thread(pipe.recv)
    return answer


# --- the core alone ----------------------------------------------------------------------------


def core_steps_per_s(running: int) -> float:
    """Decode-only steps per CPU second with this many sequences."""
    core = MockCore(CoreOptions(blocks=65536))
    for i in range(running):
        core.submit(_request(i, PROMPT, 4000))
    now = 0.0
    while core.prefill_tokens:
        now += core.step(now).duration
    steps, begun = 0, time.process_time()
    while core.busy and time.process_time() - begun < 1.0:
        now += core.step(now).duration
        steps += 1
    return steps / (time.process_time() - begun)


def core_requests_per_s() -> float:
    """Requests per CPU second from prompt to last token, in calls that span many steps."""
    core = MockCore(CoreOptions())
    count, now, begun = 0, 0.0, time.process_time()
    while time.process_time() - begun < 1.0:
        core.submit(_request(count % 400, PROMPT, OUTPUT))
        count += 1
        while core.busy:
            now += core.step(now, horizon=10.0).duration
    return count / (time.process_time() - begun)


def _request(number: int, length: int, target: int) -> Request:
    tokens = array("I", [(number * 977 + i) % 8000 for i in range(length)]).tobytes()
    local, sequence, tail = hash_prompt(tokens, 16, 0)
    return Request(
        id=str(number),
        length=length,
        local_hashes=local,
        sequence_hashes=sequence,
        tail=tail,
        source=TextReading(TextSource.of_model(model_dir()), number),
        target=target,
    )


# --- the report --------------------------------------------------------------------------------


def add_fleet(report: Report, title: str, plan: Plan, outcome: Outcome) -> float:
    """Figures of one run; returns engines per core."""
    cores = outcome.per_second("cpu_s")
    needed = plan.engines * plan.rate * OUTPUT
    carried = plan.engines / cores
    pace = percentile(outcome.client.paces, 0.5) * 1000
    report.add(f"{title}: engines per core", carried, "", f"{plan.engines}")
    report.add(f"{title}: cores used", cores, "", "1")
    report.add(f"{title}: engine steps", outcome.per_second("steps"), "1/s")
    report.add(f"{title}: tokens", outcome.per_second("tokens"), "1/s", f"{needed:,.0f}")
    report.add(f"{title}: KV events", outcome.per_second("events"), "1/s")
    report.add(f"{title}: time per token p50", pace, "ms", "5.74 +")
    ttft = percentile(outcome.client.ttfts, 0.5) * 1000
    report.add(f"{title}: time to first token p50", ttft, "ms", "20.4 +")
    report.add(f"{title}: loop lag p99", percentile(outcome.lags, 0.99) * 1000, "ms")
    report.add(f"{title}: memory per engine, idle", outcome.idle_bytes / 1024, "KiB")
    grown = outcome.after.rss / plan.engines / 1024
    report.add(f"{title}: process memory per engine, under load", grown, "KiB")
    report.add(f"{title}: requests", outcome.client.done, "")
    report.add(f"{title}: tokens lost or wrong", outcome.client.faults, "", "0")
    return carried


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--engines",
        type=int,
        default=300,
        help="300; workers check one another: traffic grows with the square",
    )
    arguments.add_argument("--rate", type=float, default=0.25, help="requests/s per engine")
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--tick", type=float, default=0.05, help="seconds of decode per call")
    arguments.add_argument("--blocks", type=int, default=4096, help="KV blocks per engine")
    given = arguments.parse_args()
    many = Plan(given.engines, given.rate, given.seconds, given.tick, given.blocks)
    few = Plan(max(1, given.engines // 10), given.rate, given.seconds, 0.0, given.blocks)
    report = Report("mock engines in one process, real time, on the bus", "needed")
    with tempfile.TemporaryDirectory() as folder:
        carried = _measure(report, Path(folder), "fleet", many)
    with tempfile.TemporaryDirectory() as folder:
        single = _measure(report, Path(folder), "single steps", few)
    for running in (1, 16, 256):
        name = f"core alone: decode steps with {running} running"
        report.add(name, core_steps_per_s(running), "1/CPU s")
    report.add("core alone: requests", core_requests_per_s(), "1/CPU s")
    report.finish(
        f"one core carries {carried:,.0f} engines at {given.rate:g} requests/s each "
        f"({single:,.0f} if every step is told on its own)",
        given.json,
    )


def _measure(report: Report, folder: Path, title: str, plan: Plan) -> float:
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(f'listen: 127.0.0.1:{port}\njetstream {{ store_dir: "{folder / "js"}" }}\n')
    server = subprocess.Popen([NATS_SERVER, "-c", config], stderr=subprocess.DEVNULL)
    try:
        outcome = uvloop.run(measure_fleet(f"nats://127.0.0.1:{port}", plan))
    finally:
        server.terminate()
        server.wait(10)
    return add_fleet(report, title, plan, outcome)


if __name__ == "__main__":
    main()
