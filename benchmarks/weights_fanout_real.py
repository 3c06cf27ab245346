"""A fan-out between real weights processes on this machine, over links of a limited rate.

Each process sends through its own bound, `weights.upload_bytes_per_s`, and receives through one
that this script adds to it: `python weights_fanout_real.py RATE` is a weights process that receives
at most RATE bytes per second over all its connections.
"""

import asyncio
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from kvmesh.transfer import Line, TransferError
from kvmesh.weights import client
from kvmesh.weights.agent import process

RECEIVE_BYTES = 128 << 10  # of a connection's buffer, so that a sender feels the bound
PIECE = 32 << 10
BURST_S = 0.02
LONGEST_S = 600.0


class Receiving:
    """At most `rate` bytes per second for all threads."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + size / self._rate
            left = self._free_at - now
        if left > 0:
            time.sleep(left)


def limit_receiving(rate: float) -> None:
    """Bound what all lines of this process receive."""
    bound, connected = Receiving(rate), Line._connected

    def with_small_buffer(line: Line) -> socket.socket:
        new = line._socket is None
        sock = connected(line)
        if new:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return sock

    def fill(line: Line, sock: socket.socket, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = sock.recv_into(target[done : done + PIECE])
            if not count:
                raise TransferError("lost", "", "the connection ended")
            bound.wait(count)
            done += count

    setattr(Line, "_connected", with_small_buffer)  # noqa: B010 (mypy knows no new methods)
    setattr(Line, "_fill", fill)  # noqa: B010


async def real_fanout(
    targets: int, size: int, chunk_bytes: int, rate: float
) -> tuple[float, float, float]:
    """Times until the last and the median target have all, and copies that the source sent.

    The targets run and look for a source before there is one; times count from its first offer.
    """
    from weights import Bench, mesh
    from weights_copy import Holder

    from kvmesh.weights.agent.manifests import ManifestStore
    from kvmesh.weights.checkpoint import checkpoint_manifest
    from kvmesh.weights.frames import WeightsCounts, WeightsKnown, WeightsTaken
    from kvmesh.weights.store import WeightStore

    client.COMMAND = (sys.executable, __file__, str(rate))
    bound = {
        "KVMESH_WEIGHTS_UPLOAD_BYTES_PER_S": str(int(rate)),
        "KVMESH_TRANSFER_VIA": "tcp",
        "KVMESH_WEIGHTS_WAIT_S": "300",
    }
    async with AsyncExitStack() as cleanup:
        enter = cleanup.enter_context
        folder = Path(enter(tempfile.TemporaryDirectory(prefix="kvmesh-weights-")))
        memory = Path(enter(tempfile.TemporaryDirectory(prefix="kvmesh-weights-", dir="/dev/shm")))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        bench = Bench(folder, memory, "cpu", quick=True, engines=False, size=size)
        manifest = checkpoint_manifest(bench.model, chunk_bytes=chunk_bytes)
        bus = await cleanup.enter_async_context(mesh(folder))
        await ManifestStore(bus).put(manifest)
        bench.remember(memory / "source", manifest)
        started = []
        for number in range(targets):
            place = memory / f"t{number}"
            empty = WeightStore(place, bench.size * 8).create(manifest)
            cleanup.callback(empty.close)
            name = f"t{number}"
            target = Holder(bench, bus, name, bench.bare, place, manifest.digest, bound)
            await target.process.start()
            cleanup.push_async_callback(target.close)
            started.append(target)
        for target in started:
            await target.event(WeightsCounts)
        source = Holder(bench, bus, "source", bench.bare, memory / "source", manifest.digest, bound)
        cleanup.push_async_callback(source.close)
        await source.process.start()
        await source.event(WeightsKnown)
        began, times = time.monotonic(), []

        async def wait(target: Holder) -> None:
            await target.event(WeightsTaken)
            times.append(time.monotonic() - began)

        async with asyncio.timeout(LONGEST_S):
            await asyncio.gather(*map(wait, started))
        await asyncio.sleep(1.5)  # until the source has counted what it sent
        sent = max(each.sent for each in source.events if isinstance(each, WeightsCounts))
        return max(times), median(times), sent / bench.size


if __name__ == "__main__":
    limit_receiving(float(sys.argv[1]))
    process.main()
