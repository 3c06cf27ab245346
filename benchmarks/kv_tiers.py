"""KV blocks between an engine and its lower tiers, with real tensors and a real kvbm process.

Each figure has beside it the machine's own speed for the same bytes in the same run: a plain copy
of the same buffers, direct reads and writes of a file, an echo over the same bus, the prompt
computed instead of loaded. Rows of a GPU are measured if there is one.
"""

import mmap
import os
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import uvloop
from common import Report, median, parser
from kv_engine import BLOCK, PREFIX_TOKENS, Engine, make_model
from kv_node import attach, node, numbered, read, until, write
from local_mesh import free_port

from kvmesh.blocks.kvbm_client import TierSpeeds
from kvmesh.bus.client import Reply
from kvmesh.bus.messages import Finish, KvLayout, LayerLayout, MessageDecoder
from kvmesh.worker.engines.torch.blocks.block_copier import BlockCopier
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool

FINISH = MessageDecoder(Finish)

GIB = 1 << 30
BYTES = 256 << 20
DISK_BYTES = 32 << 20
RUNS = 7
LOOKUPS = 400
# 16 tokens of a model of 32 layers with 8 KV heads of 128 in 16 bits; one of 8 layers in 32 bits
LARGE = KvLayout(
    weights="l",
    dtype="float16",
    item_bytes=2,
    block_size=16,
    layers=[LayerLayout(8, 128, 128)] * 32,
)
SMALL = KvLayout(
    weights="s", dtype="float32", item_bytes=4, block_size=16, layers=[LayerLayout(4, 64, 64)] * 8
)


class Timing(NamedTuple):
    """Wall and CPU seconds of one call, over all threads of this process."""

    wall: float
    cpu: float


def timed(action: Callable[[], object]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def compare(*actions: Callable[[], object]) -> list[list[Timing]]:
    """Measure several functions in turn, so that all meet the same noise."""
    for action in actions:
        action()
    return [
        list(runs) for runs in zip(*([timed(a) for a in actions] for _ in range(RUNS)), strict=True)
    ]


def rates(runs: list[Timing], size: int) -> list[float]:
    return [size / run.wall / GIB for run in runs]


def cpu_per_gib(runs: list[Timing], size: int) -> float:
    return median(run.cpu for run in runs) * GIB / size


# the host tier


@contextmanager
def shared_memory(size: int) -> Iterator[torch.Tensor]:
    """A tensor over a file in memory, like an arena."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        mapped = mmap.mmap(file.fileno(), size)
        yield torch.frombuffer(mapped, dtype=torch.uint8)


def host_tier(report: Report, layout: KvLayout, name: str, device: str) -> float:
    """Copies to and from an arena beside plain copies; returns the worst ratio of the two."""
    size = layout.block_bytes
    count = BYTES // size
    place = torch.device(device)
    pool = KvPool(layout, count, getattr(torch, layout.dtype), place)
    pool._rows.random_(0, 255)
    copier = BlockCopier(pool)
    plain, places = pool._rows.view(-1), list(range(count))
    with shared_memory(BYTES) as arena:
        if device == "cuda":
            _pin(arena)
        offsets = array("Q", range(0, BYTES, size))
        checksums = copier.offload(places, arena, offsets)
        down = compare(
            lambda: _plain_copy(arena, plain),
            lambda: pool.copy_out(places, arena, offsets),
            lambda: copier.offload(places, arena, offsets),
        )
        up = compare(
            lambda: _plain_copy(plain, arena),
            lambda: pool.copy_in(places, arena, offsets),
            lambda: copier.onboard(places, arena, offsets, checksums),
        )
    copier.close()
    least = 0.85 if device == "cuda" else 0.8
    worst = 1e9
    for way, (base, bare, checked) in (("offload", down), ("onboard", up)):
        beside, what = median(rates(base, BYTES)), f"{way}, {name}, {device}"
        target = f"≥ {least:.0%} of it"
        report.add_runs(what, rates(bare, BYTES), "GiB/s", f"{beside:.3g}", target)
        report.add_runs(f"… with checksums, {way}", rates(checked, BYTES), "GiB/s", f"{beside:.3g}")
        cpu = f"{cpu_per_gib(base, BYTES):.2g}"
        report.add(f"… CPU, {way}", cpu_per_gib(checked, BYTES), "s/GiB", cpu)
        worst = min(worst, median(rates(bare, BYTES)) / beside)
    return worst


def _plain_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    if target.is_cuda or source.is_cuda:
        torch.cuda.synchronize()


def _pin(arena: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(arena.data_ptr(), arena.numel(), 0)):
        raise RuntimeError("the arena cannot be page-locked")


# a kvbm of its own


async def lookups(report: Report, folder: Path) -> None:
    """Cost of a lookup per request: one exchange over the bus, for a prompt of 4K tokens."""
    with node(folder, "--host-bytes", str(64 << 20)) as running:
        bus, other = await running.connect("bench"), await running.connect("echo")

        async def echo(_: Finish, reply: Reply) -> None:
            reply(Finish(0, 0))

        await other.serve("echo", FINISH, echo)
        client = await attach(bus, SMALL)
        prompt = numbered("held", PREFIX_TOKENS // BLOCK, 1)
        await write(client, prompt)
        asked: list[float] = []
        echoed: list[float] = []
        for i in range(LOOKUPS):
            start = time.perf_counter()
            async with aclosing(
                client.load(prompt, prompt.blocks, TierSpeeds(), 0.0, 0.0)
            ) as parts:
                async for _ in parts:
                    break
            between = time.perf_counter()
            await bus.request("echo", Finish(i, i), FINISH, 2.0)
            echoed.append(time.perf_counter() - between)
            asked.append(between - start)
        milliseconds = [1e3 * seconds for seconds in asked]
        report.add(
            "lookup of a 4K-token prompt", median(milliseconds), "ms", f"{1e3 * median(echoed):.2g}"
        )
        await client.close()
        await bus.close()
        await other.close()


# the disk tier


def direct_io(folder: Path, size: int) -> tuple[list[Timing], list[Timing]]:
    """Write and read a file of that size with large direct calls."""
    buffer = mmap.mmap(-1, 8 << 20)
    buffer.write(os.urandom(8 << 20))
    path = folder / "raw"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def whole(call: Callable[[int, list[mmap.mmap], int], int]) -> None:
        for start in range(0, size, len(buffer)):
            call(file, [buffer], start)

    try:
        os.posix_fallocate(file, 0, size)
        writes = [timed(lambda: whole(os.pwritev)) for _ in range(3)]
        reads = [timed(lambda: whole(os.preadv)) for _ in range(3)]
    finally:
        os.close(file)
        path.unlink()
    return writes, reads


def is_on_disk(port: int, blocks: int) -> bool:
    """True if a kvbm has offloaded this many blocks to its disk."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    moved = 'kvmesh_kvbm_moved_blocks_total{source="1",target="2"} '
    return any(float(li.removeprefix(moved)) >= blocks for li in lines if li.startswith(moved))


async def disk_tier(report: Report, folder: Path, disk: Path) -> float:
    """Load prompts from disk to the arena, beside direct reads of a file."""
    size = LARGE.block_bytes
    blocks = DISK_BYTES // size
    port = free_port()
    options = ["--host-bytes", str(4 * DISK_BYTES), "--disk-path", str(disk / "tier")]
    options += ["--disk-frequency", "1", "--metrics-port", str(port)]
    with node(folder, *options) as running:
        bus = await running.connect("bench")
        client = await attach(bus, LARGE)
        prompts = [numbered(f"p{i}", blocks, i + 1) for i in range(8)]
        for count, prompt in enumerate(prompts, 1):
            await write(client, prompt)
            await until(partial(is_on_disk, port, count * blocks))
        runs: list[Timing] = []
        for prompt in prompts[:RUNS]:
            start = time.perf_counter()
            tiers = await read(client, prompt)
            if tiers[2] == blocks:
                runs.append(Timing(time.perf_counter() - start, 0.0))
        await client.close()
        await bus.close()
    _, raw = direct_io(disk, blocks * size)
    if not runs:
        raise RuntimeError("nothing came from the disk")
    ours, beside = rates(runs, blocks * size), median(rates(raw, blocks * size))
    report.add_runs("disk to arena", ours, "GiB/s", f"{beside:.3g}", "≥ 80% of it")
    return median(ours) / beside


# the whole way


async def whole_way(report: Report, folder: Path) -> float:
    """TTFT on a second worker: it loads the first worker's blocks, or computes them again."""
    model = folder / "model"
    make_model(model)
    with node(folder, "--host-bytes", str(512 << 20)) as running:
        bus = await running.connect("bench")
        first, second = Engine(bus, model, "w-1"), Engine(bus, model, "w-2")
        await first.start()
        await second.start()
        await first.ttft("warm", "a")
        await first.written()
        computed: list[float] = []
        loaded: list[float] = []
        for i in range(3):
            computed.append(await second.ttft(f"computed-{i}", f"nobody-{i}"))
            await second.written()
            loaded.append(await second.ttft(f"loaded-{i}", "a"))
            assert second.loaded(f"loaded-{i}") == PREFIX_TOKENS
        await first.close()
        await second.close()
        await bus.close()
    beside = f"{median(computed):.3g}"
    report.add_runs("TTFT of a 4K-token prefix, onboarded", loaded, "s", beside)
    return median(computed) / median(loaded)


async def run(disk: Path, json_file: Path | None) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    report = Report("KV tiers", "plain, same run")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    ratio = min(
        host_tier(report, layout, name, device)
        for device in devices
        for layout, name in ((LARGE, "2 MiB blocks"), (SMALL, "256 KiB blocks"))
    )
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        await lookups(report, Path(one))
        gain = await whole_way(report, Path(two))
    with tempfile.TemporaryDirectory() as three, tempfile.TemporaryDirectory(dir=disk) as on_disk:
        share = await disk_tier(report, Path(three), Path(on_disk))
    gpu = "" if "cuda" in devices else "; no GPU here, so no GPU rows"
    report.finish(
        f"host tier at {ratio:.0%} of a plain copy or better, disk tier at {share:.0%} of direct "
        f"reads, TTFT ÷ {gain:.1f} by onboarding{gpu}",
        json_file,
    )


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder on a disk")
    options = arguments.parse_args()
    uvloop.run(run(options.disk, options.json))


if __name__ == "__main__":
    main()
