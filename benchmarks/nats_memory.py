"""The limit of a NATS server's memory: a mesh's records, written until nothing grows.

    python benchmarks/nats_memory.py [--minutes 12] [--rate 400] [--blocks 64]

Starts the server as `kvmesh up` does and writes the records of frontends, routers and workers for
`rate` requests a second, as fast as the server accepts them: a minute of the mesh takes some
seconds. After each minute it prints the server's resident memory and the size of its streams.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from common import rss_bytes
from local_mesh import free_port, wait_for_port

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import (
    Candidate,
    Decision,
    KvBatch,
    KvEvent,
    Outcome,
    Removed,
    SeqAdd,
    SeqBatch,
    SeqFree,
    SeqPrefilled,
    Stored,
)
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.cli.supervisor.nats import server_config, server_environ
from kvmesh.runtime.service import stream_limits
from kvmesh.settings.schema import StreamSettings

MODEL = "kvmesh-demo"
TOKEN = "benchmark"
WORKERS = 4
NEW_SHARE = 4  # one in this many of a prompt's blocks is new, as in agents' turns
FLUSH_EVERY = 500


def candidate(number: int) -> Candidate:
    return Candidate(
        instance=f"worker-{number}-b8b8de0c",
        worker=f"worker-{number}",
        rank=0,
        overlap=[48, 0, 0, 0],
        prefill=16.0,
        decode=120.0,
        requests=4,
        cost=184.25,
    )


class Writer:
    """Writes the records of one request after another."""

    def __init__(self, bus: Bus, blocks: int) -> None:
        self._bus = bus
        self._blocks = blocks
        self._ids = [0] * WORKERS
        self._rng = random.Random(1)

    async def request(self, number: int) -> None:
        name, now = f"chatcmpl-{number:024x}", time.time()
        rank = number % WORKERS
        instance = f"worker-{rank}-b8b8de0c"
        subjects = self._bus.subjects
        sequence = self._rng.randbytes(8 * self._blocks)
        tokens = 16 * self._blocks
        ranks = [candidate(n) for n in range(WORKERS)]
        decision = Decision(
            request=name,
            model=MODEL,
            time=now,
            router="router-0-819b11d0",
            policy="kv",
            chosen=ranks[rank],
            candidates=ranks,
            tokens=tokens,
            sequence_hashes=sequence,
            max_tokens=1024,
            block_size=16,
        )
        outcome = Outcome(
            request=name,
            instance=instance,
            time=now,
            cached_tokens=tokens,
            output_tokens=32,
            ttft_s=0.1,
            total_s=0.5,
            finish="stop",
        )
        seq, route = subjects.seq(MODEL), subjects.route(MODEL)
        added = SeqAdd(name, instance, 0, sequence, tokens, self._blocks, 1024, now)
        for event in (added, SeqPrefilled(name), SeqFree(name)):
            self._bus.post(seq, SeqBatch("frontend-0-8fe25435", [event]))
        self._bus.post(route, decision)
        self._bus.post(route, outcome)
        new = sequence[: 8 * max(1, self._blocks // NEW_SHARE)]
        events: list[KvEvent] = [Stored(0, None, new, new, 1), Removed(0, new)]
        batch = KvBatch(f"worker-{rank}", instance, 0, self._ids[rank], now, events)
        self._ids[rank] += len(events)
        self._bus.post(subjects.kv(MODEL, f"worker-{rank}"), batch)


async def held(bus: Bus) -> str:
    names = bus.subjects
    parts = []
    for name in (names.seq_stream, names.route_stream, names.kv_stream):
        state = (await bus.js.stream_info(name)).state
        parts.append(f"{name.rpartition('-')[2]} {state.bytes / 2**20:7.1f} MiB")
    return "  ".join(parts)


async def write(url: str, pid: int, streams: StreamSettings, options: argparse.Namespace) -> None:
    bus = await Bus.connect(BusOptions(url=url, token=TOKEN), "bench")
    await ensure_streams(bus, stream_limits(streams))
    writer, number = Writer(bus, options.blocks), 0
    print(f"minute 0: server {rss_bytes(pid) / 2**20:6.1f} MiB")
    for minute in range(1, options.minutes + 1):
        for _ in range(60 * options.rate):
            await writer.request(number)
            number += 1
            if number % FLUSH_EVERY == 0:
                await bus.js.stream_info(bus.subjects.kv_stream)  # waits until it has caught up
        print(f"minute {minute}: server {rss_bytes(pid) / 2**20:6.1f} MiB  {await held(bus)}")
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=int, default=12)
    parser.add_argument("--rate", type=int, default=400, help="requests a second")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a prompt")
    parser.add_argument("--seq-bytes", type=int, default=StreamSettings().seq_bytes)
    parser.add_argument("--memory-limit", help="GOMEMLIMIT instead of that of `up`; off: none")
    options = parser.parse_args()
    streams = msgspec.structs.replace(StreamSettings(), seq_bytes=options.seq_bytes)
    environ = server_environ(streams, os.environ)
    if options.memory_limit:
        environ["GOMEMLIMIT"] = options.memory_limit
    with tempfile.TemporaryDirectory() as folder:
        port, config = free_port(), Path(folder, "nats.conf")
        config.write_text(server_config(port, TOKEN, Path(folder, "js"), streams))
        server = str(Path(sys.executable).with_name("nats-server"))
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                [server, "-c", str(config)], env=environ, stdout=log, stderr=log
            )
        wait_for_port(port)
        try:
            asyncio.run(write(f"nats://127.0.0.1:{port}", process.pid, streams, options))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
