"""Delay of other clients while one client sends the costliest bodies to every endpoint.

A stream gets a token every few milliseconds. For each body the script prints, as the median of
several repetitions: the largest gap between two pieces of that stream, the longest pause of the
frontend's event loop by the clock and in CPU time of its process (which other programs do not
lengthen), and its longest garbage collection; and the frontend's peak memory, with the status of
the response. `coded_bodies` follow: compressed and oversized bodies that are refused.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from statistics import median
from typing import NamedTuple

import aiohttp
from coded_bodies import measure_coded
from hostile import CHAT, MODEL, Body, bodies
from local_mesh import Mesh, running_mesh
from ticking_frontend import TICKS, Ticks

MIB = 1 << 20


class TickingMesh(Mesh):
    """A mesh whose frontend records its own stalls."""

    def __init__(self, folder: Path, options: dict[str, str], frontends: int) -> None:
        file = folder / "ticks"
        super().__init__(folder, {**options, TICKS: str(file)}, frontends)
        self.ticks = Ticks(file)

    def command(self, role: str) -> list[str]:
        if role != "frontend":
            return super().command(role)
        return [sys.executable, str(Path(__file__).with_name("ticking_frontend.py"))]


class Seen(NamedTuple):
    """Figures of one body sent once; times in seconds, memory in MiB."""

    status: int
    took: float
    gap: float
    wall: float
    cpu: float
    longest_gc: float
    gc: float
    peak: float
    after: float


async def gap(mesh: Mesh, during: "asyncio.Future[tuple[int, float]]") -> float:
    """The largest pause of a stream until `during` is done."""
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1900, "stream": True}
    largest = 0.0
    async with aiohttp.ClientSession() as session:
        while True:
            sent = {"model": MODEL, "ignore_eos": True, **body}
            async with session.post(mesh.url + CHAT, json=sent) as answer:
                await answer.content.readany()
                last = time.perf_counter()
                async for _ in answer.content.iter_any():
                    now = time.perf_counter()
                    largest, last = max(largest, now - last), now
                    if during.done():
                        return largest


async def post(mesh: Mesh, body: Body) -> tuple[int, float]:
    """Status and seconds of one request."""
    headers = {"content-type": "application/json"}
    started = time.perf_counter()
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(
            mesh.url + body.path, data=body.body, timeout=aiohttp.ClientTimeout(300)
        ) as answer,
    ):
        await answer.read()
        return answer.status, time.perf_counter() - started


def memory(mesh: Mesh, field: str) -> float:
    """MiB of the frontend: `VmRSS` now, `VmHWM` the peak since the last `forget_peak`."""
    for line in Path(f"/proc/{mesh.pids['frontend']}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return 0.0


def forget_peak(mesh: Mesh) -> None:
    Path(f"/proc/{mesh.pids['frontend']}/clear_refs").write_text("5")


async def measure(mesh: TickingMesh, mib: float, times: int, only: str) -> None:
    print(
        f"{'body':<30}{'status':>7}{'took':>9}{'gap':>8}{'loop':>8}{'CPU':>8}{'GC':>8}"
        f"{'all GC':>8}{'peak':>9}{'after':>9}"
    )
    quiet = [await seen(mesh, asyncio.sleep(3, (0, 3.0))) for _ in range(times)]
    row("(none)", quiet)
    for body in bodies(int(mib * MIB)):
        if re.search(only, body.name):
            row(body.name, [await seen(mesh, post(mesh, body)) for _ in range(times)])


async def seen(mesh: TickingMesh, work: Coroutine[None, None, tuple[int, float]]) -> Seen:
    forget_peak(mesh)
    sent = asyncio.ensure_future(later(mesh, work))
    largest = await gap(mesh, sent)
    status, took = await sent
    told = mesh.ticks.read()
    peak, after = memory(mesh, "VmHWM"), memory(mesh, "VmRSS")
    return Seen(status, took, largest, *told, peak, after)


async def later(
    mesh: TickingMesh, work: Coroutine[None, None, tuple[int, float]]
) -> tuple[int, float]:
    await asyncio.sleep(0.3)
    mesh.ticks.reset()
    try:
        return await work
    finally:
        await asyncio.sleep(0.3)


def row(name: str, found: list[Seen]) -> None:
    status, took, *stalls, peak, after = map(median, zip(*found, strict=True))
    pauses = "".join(f"{stall * 1e3:>5.0f} ms" for stall in stalls)
    print(
        f"{name:<30}{status or '':>7}{took:>7.2f} s{pauses}{peak:>5.0f} MiB{after:>5.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=7.9, help="size of each body")
    parser.add_argument("--context", type=int, default=1 << 21, help="context of the model")
    parser.add_argument("--times", type=int, default=3, help="repetitions of each body")
    parser.add_argument("--only", default="", help="only bodies whose names match this pattern")
    parser.add_argument("--coded", action="store_true", help="only compressed and oversized ones")
    options = parser.parse_args()
    context, blocks = str(options.context), str(2 * options.context // 16)
    with running_mesh(
        workers=1,
        speedup=1,
        kind=TickingMesh,
        KVMESH_WORKER_CONTEXT=context,
        KVMESH_MOCK_BLOCKS=blocks,
    ) as mesh:
        assert isinstance(mesh, TickingMesh)
        if not options.coded:
            asyncio.run(measure(mesh, options.mib, options.times, options.only))
        if not options.only:
            measure_coded(mesh, mesh.ticks, int(options.mib * MIB), options.times)


if __name__ == "__main__":
    main()
