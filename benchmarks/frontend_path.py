"""CPU and latency of the whole path with mock engines: the mesh's cost beside the model.

Runs its own mesh (NATS, router, indexer, frontend, four mock workers) and measures the CPU
time of the frontend and of all server processes over the same interval. The peer's figures are
from another 2-core machine of the same kind, so compare orders of magnitude, not percents.
"""

import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from chat_load import MODEL, Connection, Timing, chat, drive, prompts
from common import Interval, Report, measure, median, parser, percentile, rss_bytes
from frontend_stages import served, token_path, turn_stages
from local_mesh import Mesh, free_port, running_mesh, wait_for_port

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import MessageDecoder, RouteReply, RouteRequest, SeqBatch, SeqFree
from kvmesh.hashing import block_hashes, salt

ROUTE_REPLY: MessageDecoder[RouteReply] = MessageDecoder(RouteReply)

WORKERS = 4
CONCURRENCY = 32
STEP_MS = 10.0
COLD = 30
IDLE_S = 3.0
CONVERSATION = 40_000
TURN = 600
HEARD = 200


@dataclass
class Scale:
    """Amount of each kind of work in one run."""

    runs: int
    short: int
    streams: int
    paced: int
    latencies: int
    unseen: int
    turns: int


FULL = Scale(runs=3, short=3000, streams=256, paced=64, latencies=400, unseen=60, turns=24)
QUICK = Scale(runs=1, short=600, streams=64, paced=32, latencies=100, unseen=20, turns=8)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Bench:
    """Measures one mesh; every figure goes to `report`."""

    def __init__(self, mesh: Mesh, report: Report, scale: Scale) -> None:
        self._mesh = mesh
        self._report = report
        self._scale = scale
        self._seeds = itertools.count(1)

    def _bodies(self, tokens: int, count: int, output: int, stream: bool) -> Iterator[bytes]:
        texts = itertools.islice(prompts(next(self._seeds), tokens), count)
        return iter([chat(user(text), output, stream) for text in texts])

    def _load(self, bodies: Iterator[bytes], concurrency: int) -> tuple[Interval, list[Timing]]:
        with measure(self._mesh.pids) as interval:
            timings = uvloop.run(drive(self._mesh.url, bodies, concurrency))
        return interval, timings

    def _repeat(
        self,
        name: str,
        unit: str,
        work: Callable[[], tuple[Interval, float]],
        peer: tuple[str, str],
    ) -> float:
        """Report medians of the frontend and of all processes; return the former.

        `work` returns its use and the factor that converts CPU seconds to `unit`.
        """
        runs = [work() for _ in range(self._scale.runs)]
        targets = TARGETS.get(name, ("", ""))
        mine = [interval.of("frontend") * factor for interval, factor in runs]
        total = [interval.total_s * factor for interval, factor in runs]
        self._report.add_runs(f"{name}: frontend", mine, unit, peer[0], targets[0])
        self._report.add_runs(f"{name}: all processes", total, unit, peer[1], targets[1])
        for role in ("router", "indexer", "worker", "nats"):
            share = [interval.of(role) * factor for interval, factor in runs]
            self._report.add_runs(f"    {role}{'s' * (role == 'worker')}", share, unit)
        return median(mine)

    def short(self) -> float:
        """Non-streaming requests of 36 tokens in and 16 out."""

        def work() -> tuple[Interval, float]:
            count = self._scale.short
            interval, _ = self._load(self._bodies(28, count, 16, False), CONCURRENCY)
            return interval, 1e3 / count

        self._load(self._bodies(28, 300, 16, False), CONCURRENCY)
        return self._repeat("short request", "CPU ms/request", work, ("0.41–0.59", "0.76–1.3"))

    def streaming(self) -> float:
        """Streams of 256 tokens, as fast as the engines generate them."""

        def work() -> tuple[Interval, float]:
            tokens = self._scale.streams * 256
            bodies = self._bodies(28, self._scale.streams, 256, True)
            interval, _ = self._load(bodies, CONCURRENCY)
            return interval, 1e6 / tokens

        return self._repeat("streaming", "CPU µs/token", work, ("9.6–12.5", "17–27"))

    def paced(self) -> float:
        """Streams of 128 tokens, one engine step per 10 ms, so that each token is sent alone."""

        def work() -> tuple[Interval, float]:
            tokens = self._scale.paced * 128
            bodies = self._bodies(28, self._scale.paced, 128, True)
            interval, _ = self._load(bodies, CONCURRENCY)
            return interval, 1e6 / tokens

        self._load(self._bodies(28, 32, 16, True), CONCURRENCY)
        cpu = self._repeat("paced streaming", "CPU µs/token", work, ("27–30", "48–51"))
        token_path(self._report, served())
        self._idle(CONCURRENCY / STEP_MS * 1e3)
        return cpu

    def _idle(self, rate: float) -> None:
        """The mesh's use without requests, divided by `rate` tokens a second."""
        with measure(self._mesh.pids) as interval:
            time.sleep(IDLE_S)
        used = interval.total_s / IDLE_S / rate * 1e6
        self._report.add("    all processes, idle for as long", used, "CPU µs/token")

    def isolation(self) -> None:
        """Gaps of eight paced streams while cold 40K-token prompts are prepared, one by one."""
        calm = self._gaps(cold=0)
        disturbed = self._gaps(cold=COLD)
        self._report.add("gap p99 of 8 paced streams: alone", calm, "ms", "11 (Infera)")
        self._report.add(
            "gap p99 of 8 paced streams: beside cold 40K prompts",
            disturbed,
            "ms",
            "102 (Infera)",
            "≤ 15",
        )

    def _gaps(self, cold: int) -> float:
        """The 99th percentile gap in ms."""
        paced = self._bodies(28, 8, 256, True)
        heavy = list(self._bodies(CONVERSATION, cold, 1, True))

        async def both() -> list[Timing]:
            streams = asyncio.create_task(drive(self._mesh.url, paced, 8))
            await asyncio.sleep(0.2)
            while heavy and not streams.done():
                await drive(self._mesh.url, iter([heavy.pop()]), 1)
            return await streams

        timings = uvloop.run(both())
        return percentile([gap for t in timings for gap in t.gaps_s[2:-1]], 0.99) * 1e3

    def latency(self) -> float:
        """Time to first token, one request at a time."""
        connection = Connection(self._mesh.url)
        bodies = self._bodies(28, self._scale.latencies, 4, True)
        firsts = [connection.stream(body).first_s * 1e3 for body in bodies][20:]
        connection.close()
        p50, p99 = median(firsts), percentile(firsts, 0.99)
        self._report.add("TTFT, concurrency 1: p50", p50, "ms", "1.4–1.9", "≤ 2.5")
        self._report.add("TTFT, concurrency 1: p99", p99, "ms", "7–8", "≤ 6")
        return p50

    def unseen(self) -> None:
        """Prompts of 4.2K tokens without a cached prefix."""

        def work() -> tuple[Interval, float]:
            count = self._scale.unseen
            interval, _ = self._load(self._bodies(4192, count, 1, False), 1)
            return interval, 1e3 / count

        self._repeat("unseen 4.2K prompt", "CPU ms/request", work, ("5–8", ""))

    def agent_turn(self) -> float:
        """Turns of a 40K-token conversation that grows by about 600 tokens each."""
        firsts: list[float] = []

        def work() -> tuple[Interval, float]:
            turns = self._turns()
            connection = Connection(self._mesh.url)
            connection.stream(next(turns))
            with measure(self._mesh.pids) as interval:
                firsts.extend(connection.stream(body).first_s * 1e3 for body in turns)
            connection.close()
            count = self._scale.turns
            return interval, 1e3 / count

        cpu = self._repeat("agent turn (40K + 600)", "CPU ms/turn", work, ("3.6–4.6", "5–7"))
        turn_stages(self._report, served(), self._turns())
        self._report.add("agent turn: TTFT p50", median(firsts), "ms", "3.7–5.0")
        return cpu

    def _turns(self) -> Iterator[bytes]:
        """The conversation at 40K tokens, then longer by a call, its result and a reply each."""
        texts = prompts(next(self._seeds), TURN // 2)
        messages = [{"role": "system", "content": "You are a careful engineer." + next(texts)}]
        while len(messages) * TURN // 2 < CONVERSATION:
            role = "user" if len(messages) % 2 else "assistant"
            messages.append({"role": role, "content": next(texts)})
        for _ in range(self._scale.turns + 1):
            yield chat(messages, 8, True)
            messages.append({"role": "assistant", "content": next(texts)})
            messages.append({"role": "user", "content": next(texts)})

    def routing(self) -> float:
        """One routing decision over the bus, for a prompt of 128 blocks, index included."""
        times = uvloop.run(_route(self._mesh.nats_url, self._scale.latencies))
        p50 = median(times)
        self._report.add(
            "route request over the bus: p50", p50, "ms", "0.125 (in process)", "≤ 0.3"
        )
        return p50

    def memory(self) -> None:
        mebibytes = rss_bytes(self._mesh.pids["frontend"]) / (1 << 20)
        self._report.add("frontend RSS after all runs", mebibytes, "MiB", "140–200", "≤ 150")


TARGETS = {
    "short request": ("≤ 0.6", "≤ 1.3"),
    "streaming": ("≤ 10", "≤ 22"),
    "paced streaming": ("≤ 25", "≤ 50"),
    "unseen 4.2K prompt": ("≤ 3", ""),
    "agent turn (40K + 600)": ("≤ 3", "≤ 6"),
}


async def _route(nats_url: str, count: int) -> list[float]:
    """Milliseconds of each request."""
    bus = await Bus.connect(BusOptions(url=nats_url), "benchmark")
    times = []
    for index in range(count):
        tokens = b"".join((index * 4096 + i).to_bytes(4, "little") for i in range(2048))
        sequence = bytes(block_hashes(tokens, 16, salt(MODEL))[1])
        request = RouteRequest(
            request=f"bench-{index}",
            model=MODEL,
            sequence_hashes=sequence,
            tokens=2048,
            max_tokens=1,
            deadline_s=5.0,
            alone=True,
        )
        started = time.perf_counter()
        await bus.request(bus.subjects.router(MODEL), request, ROUTE_REPLY, 5.0)
        times.append((time.perf_counter() - started) * 1e3)
        freed = SeqBatch(source="benchmark", events=[SeqFree(request=request.request)])
        bus.post(bus.subjects.seq(MODEL), freed)
    await bus.close()
    return times


@contextmanager
def paced_mesh() -> Iterator[Mesh]:
    """Engines that decode a step in 10 ms and compute prompts at once, so nothing waits."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        profile = Path(folder) / "steps.npz"
        tokens, flat = np.array([1, 1 << 20]), np.full((2, 2), STEP_MS)
        np.savez(
            profile,
            prefill_isl=tokens,
            prefill_ttft_ms=np.zeros(2),
            decode_active_kv_tokens=tokens,
            decode_context_length=tokens,
            decode_itl=flat,
        )
        with running_mesh(WORKERS, 1.0, KVMESH_MOCK_PROFILE=str(profile)) as mesh:
            yield mesh


@contextmanager
def floor(pace: float) -> Iterator[tuple[str, int]]:
    """URL and pid of a server that only writes: the minimal cost of HTTP on this machine now."""
    port = free_port()
    server = Path(__file__).with_name("floor_server.py")
    command = [sys.executable, str(server), "--port", str(port), "--pace", str(pace)]
    with subprocess.Popen(command) as process:
        try:
            wait_for_port(port)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def floors(report: Report, scale: Scale) -> None:
    """The same three loads on the floor server, beside its figures on the peers' machine."""
    for name, published, unit, pace, stream, tokens, count in (
        ("short request", "0.035", "CPU ms/request", 0.0, False, 16, scale.short),
        ("streaming", "9.1", "CPU µs/token", 0.0, True, 256, scale.streams),
        ("paced streaming", "19", "CPU µs/token", 0.01, True, 128, scale.paced),
    ):
        factor = 1e6 / (count * tokens) if stream else 1e3 / count
        with floor(pace) as (url, pid):
            bodies = [chat(user("hello"), tokens, stream)] * count
            uvloop.run(drive(url, iter(bodies[: count // 4]), CONCURRENCY))
            with measure({"floor": pid}) as used:
                uvloop.run(drive(url, iter(bodies), CONCURRENCY))
        label = f"floor, HTTP alone: {name}"
        report.add(label, used.total_s * factor, unit, f"{published} (this server there)")


def run(scale: Scale, json_file: Path | None) -> None:
    report = Report("The whole path, four mock workers", "Dynamo 1.6.1")
    with running_mesh(WORKERS) as mesh:
        bench = Bench(mesh, report, scale)
        per_request = bench.short()
        per_token = bench.streaming()
        ttft = bench.latency()
        bench.unseen()
        per_turn = bench.agent_turn()
        bench.routing()
        bench.memory()
    with paced_mesh() as mesh:
        bench = Bench(mesh, report, scale)
        paced = bench.paced()
        bench.isolation()
    floors(report, scale)
    report.finish(
        f"frontend path: {per_request:.2f} CPU ms/request (Dynamo 0.41–0.59), "
        f"{per_token:.1f} µs/token (9.6–12.5), paced {paced:.1f} (27–30), "
        f"TTFT p50 {ttft:.2f} ms (1.4–1.9), agent turn {per_turn:.1f} CPU ms (3.6–4.6)",
        json_file,
    )


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--quick", action="store_true", help="one short run of each")
    options = arguments.parse_args()
    run(QUICK if options.quick else FULL, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
