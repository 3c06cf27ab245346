"""The dashboard's cost with many workers and sessions: its process, its bytes, the browser's work.

Three processes: a NATS server, a generator (the cards and loads of every worker, and requests of
all sessions in turn, as messages alone), and `kvmesh dashboard`. Then Chromium opens pages. The
baseline is the dashboard that nobody looks at, which follows the mesh all the same. Without
Chromium (Debian's package), only that is measured.
"""

import asyncio
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from common import Report, cpu_seconds, median, parser, rss_bytes
from local_mesh import free_port, nats_command, wait_for_port
from playwright.async_api import CDPSession, Page, WebSocket, async_playwright

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import (
    CacheAccount,
    CacheLoss,
    Candidate,
    Capacity,
    Decision,
    Hints,
    Instance,
    Load,
    ModelCard,
    Outcome,
    Role,
    SeqAdd,
    SeqBatch,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
)
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams

MODEL, BLOCK = "bench", 16
LIMITS = StreamLimits(lease_s=3600.0)
SETTLE_S = 5.0
CHROMIUM = shutil.which("chromium")


async def generate(url: str, workers: int, sessions: int, rate: float, replay_s: float) -> None:
    """Publish as a mesh would: `rate` requests a second, `replay_s` seconds of them at once."""
    bus = await Bus.connect(BusOptions(url=url), "generator")
    await ensure_streams(bus, LIMITS)
    subjects, random = bus.subjects, Random(1)
    names = [f"worker-{n}-0000000{n % 10}" for n in range(workers)]
    model = ModelCard(name=MODEL, context=262_144, block_size=BLOCK, files="")
    capacity = Capacity(blocks=16_384, max_sequences=256, max_batched_tokens=8192)
    for name in names:
        card = Instance(
            instance=name,
            role=Role.WORKER,
            name=name.rpartition("-")[0],
            version="1",
            started=time.time(),
            model=model,
            capacity=capacity,
        )
        key = subjects.lease_key(Role.WORKER, name)
        bus.post(f"$KV.{subjects.instances_bucket}.{key}", card)
    sent = int(rate * replay_s)
    for number in range(sent):
        _request(bus, number, names, sessions, random)
        if not number % 100:
            await bus.client.flush()
    started, step, first = time.perf_counter(), 0, sent
    while True:
        step += 1
        for rank, name in enumerate(names[step % 10 :: 10]):
            bus.post(subjects.load(name), _load(name, step, random, rank))
        while sent < first + (time.perf_counter() - started) * rate:
            _request(bus, sent, names, sessions, random)
            sent += 1
        await asyncio.sleep(max(0.0, started + step / 10 - time.perf_counter()))


def _load(name: str, step: int, random: Random, rank: int) -> Load:
    return Load(
        instance=name,
        rank=0,
        running=random.randrange(32),
        waiting=random.randrange(4),
        active_blocks=random.randrange(8000),
        cached_blocks=8000,
        total_blocks=16_384,
        prefill_tokens=0,
        steps=50 * step,
        prompt_tokens=20_000 * step,
        cached_tokens=18_000 * step,
        output_tokens=1000 * step,
        requests=step,
        step_s=0.02,
        busy_s=step * 0.9,
        computed_tokens=2000 * step + rank,
    )


def _request(bus: Bus, number: int, names: list[str], sessions: int, random: Random) -> None:
    """One turn of 8,000 tokens, from its placement to its end, three quarters of it cached."""
    subjects, request = bus.subjects, f"chatcmpl-{number:012d}"
    session, now = number % sessions, time.time()
    name = names[(session * 7 + random.randrange(3)) % len(names)]
    chosen = Candidate(
        instance=name,
        worker=name.rpartition("-")[0],
        rank=0,
        overlap=[375, 0, 0, 0],
        prefill=125.0,
        decode=500.0,
        requests=3,
        cost=130.0,
    )
    hashes = Random(session).randbytes(8 * 500)
    hints = Hints(session=f"session-{session}", tenant=f"tenant-{session % 50}")
    decision = Decision(
        request=request,
        model=MODEL,
        time=now,
        router="router-0",
        policy="kv",
        chosen=chosen,
        candidates=[chosen] * 8,
        tokens=8000,
        sequence_hashes=hashes,
        max_tokens=256,
        block_size=BLOCK,
        eligible=len(names),
        hints=hints,
    )
    loss = CacheLoss(first=6000, tokens=1000, reason="evicted", worker=name, tier=0, time=now)
    account = CacheAccount(prompt_tokens=8000, own=6000, new=1000, possible=7000, losses=[loss])
    outcome = Outcome(
        request=request,
        instance=name,
        time=now,
        cached_tokens=6000,
        output_tokens=256,
        ttft_s=0.2,
        total_s=4.0,
        finish="stop",
        cached_tiers=[6000],
        cache=account,
        model=MODEL,
        tenant=f"tenant-{session % 50}",
        session=f"session-{session}",
        prompt_tokens=8000,
    )
    events: list[SeqEvent] = [
        SeqAdd(request, name, 0, b"", 8000, 375, 256, now),
        SeqPrefilled(request),
        *(SeqProgress(request, tokens) for tokens in range(16, 257, 16)),
        SeqFree(request),
    ]
    bus.post(subjects.route(MODEL), decision)
    bus.post(subjects.seq(MODEL), SeqBatch("bench", events))
    bus.post(subjects.route(MODEL), outcome)


def _generator(*arguments: Any) -> None:
    uvloop.run(generate(*arguments))


class Viewer:
    """A page in the browser, with the bytes that its stream has received."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.received = 0
        page.on("websocket", self._on_websocket)

    def _on_websocket(self, socket: WebSocket) -> None:
        socket.on("framereceived", self._on_frame)

    def _on_frame(self, frame: str | bytes) -> None:
        self.received += len(frame)


async def watch(
    report: Report, url: str, dashboard: int, paths: list[str], seconds: float, idle: float
) -> None:
    """Open each page for so many seconds, then five pages at once."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else []
        )
        for group in (*([path] for path in paths), paths[:1] * 5):
            viewers = [Viewer(await browser.new_page()) for _ in group]
            shown = []
            for viewer, path in zip(viewers, group, strict=True):
                started = time.perf_counter()
                await viewer.page.goto(url + path)
                await viewer.page.wait_for_selector("main h1")
                shown.append(time.perf_counter() - started)
            await asyncio.sleep(SETTLE_S)
            session = await viewers[0].page.context.new_cdp_session(viewers[0].page)
            await session.send("Performance.enable")
            work = [await _task_s(session)]
            bytes_before, cpu_before = sum(v.received for v in viewers), cpu_seconds(dashboard)
            await asyncio.sleep(seconds)
            work.append(await _task_s(session))
            name = group[0] if len(group) == 1 else f"{len(group)} × {group[0]}"
            cpu = (cpu_seconds(dashboard) - cpu_before) / seconds
            received = (sum(v.received for v in viewers) - bytes_before) / seconds
            report.add(f"{name}: shown after", median(shown), "s")
            report.add(f"{name}: dashboard", 100 * cpu, "% of a core", f"{idle:.1f}")
            report.add(f"{name}: stream", received / 1000, "kB/s")
            report.add(f"{name}: the page's thread", 100 * (work[1] - work[0]) / seconds, "%")
            for viewer in viewers:
                await viewer.page.close()
        await browser.close()


async def _task_s(session: CDPSession) -> float:
    metrics = await session.send("Performance.getMetrics")
    return next(float(m["value"]) for m in metrics["metrics"] if m["name"] == "TaskDuration")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--workers", type=int, default=1000)
    arguments.add_argument("--sessions", type=int, default=10_000)
    arguments.add_argument("--rate", type=float, default=50.0, help="requests per second")
    arguments.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    arguments.add_argument("--paths", nargs="+", default=["/"], help="pages to open")
    options = arguments.parse_args()
    port, page_port = free_port(), free_port()
    title = f"Dashboard: {options.workers:,} workers, {options.sessions:,} sessions, "
    report = Report(f"{title}{options.rate:g} requests/s of 8,000 tokens", "without viewers")
    with tempfile.TemporaryDirectory() as folder:
        nats = subprocess.Popen(
            nats_command(Path(folder), port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_port(port)
        url = f"nats://127.0.0.1:{port}"
        replay_s = options.sessions / options.rate
        generator = multiprocessing.Process(
            target=_generator,
            args=(url, options.workers, options.sessions, options.rate, replay_s),
            daemon=True,
        )
        generator.start()
        time.sleep(SETTLE_S)
        command = (sys.executable, "-m", "kvmesh.cli.main", "dashboard", "--nats", url)
        dashboard = subprocess.Popen([*command, "--port", str(page_port)])
        try:
            wait_for_port(page_port)
            time.sleep(2 * SETTLE_S)
            before = cpu_seconds(dashboard.pid)
            time.sleep(options.seconds)
            idle = 100 * (cpu_seconds(dashboard.pid) - before) / options.seconds
            report.add("without viewers", idle, "% of a core")
            if CHROMIUM:
                page = f"http://127.0.0.1:{page_port}"
                asyncio.run(
                    watch(report, page, dashboard.pid, options.paths, options.seconds, idle)
                )
            memory = rss_bytes(dashboard.pid) / 1e6
            report.add("dashboard's memory", memory, "MB")
        finally:
            for process in (generator, dashboard, nats):
                process.terminate()
    report.finish(f"{title}{idle:.1f} % of a core without viewers, {memory:.0f} MB", options.json)


if __name__ == "__main__":
    main()
