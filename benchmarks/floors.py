"""The least that parts of a request can cost here: HTTP alone, a NATS hop, the frontend's stages.

HTTP is aiohttp on uvloop with made-up answers. A hop is one message from a plain socket through a
NATS server to another one. The frontend's stages run in this process. A placement is one request
over the bus for a prompt of 128 blocks, index included.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from chat_load import MODEL, Connection, chat, drive, prompts, user
from common import Report, cpu_seconds, measure, median, parser
from frontend_stages import served, token_path, turn_stages
from local_mesh import NATS_THREADS, environ, free_port, nats_command, running_mesh, wait_for_port
from rows import CONCURRENCY, SHORT, conversation

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import MessageDecoder, RouteReply, RouteRequest, SeqBatch, SeqFree
from kvmesh.hashing import block_hashes, salt

ROUTE_REPLY: MessageDecoder[RouteReply] = MessageDecoder(RouteReply)
PLACEMENTS, HOPS = 400, 3000
SIZES = {"a short message": 200, "25 kB, the hashes of 50K tokens": 25_000}


@contextmanager
def server(command: list[str], port: int) -> Iterator[int]:
    """The pid of a process that listens on the port."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=environ() | NATS_THREADS, stderr=quiet) as process:
        try:
            wait_for_port(port)
            yield process.pid
        finally:
            process.terminate()


def http(report: Report) -> None:
    """The loads of the rows on a server that only writes."""
    program = str(Path(__file__).with_name("floor_server.py"))
    for name, unit, pace, stream, tokens, count in (
        ("short request", "CPU ms", 0.0, False, 16, 2000),
        ("streamed token", "CPU µs", 0.0, True, 256, 128),
        ("paced token", "CPU µs", 0.01, True, 128, 64),
    ):
        port = free_port()
        command = [sys.executable, program, "--port", str(port), "--pace", str(pace)]
        text = next(prompts(1, SHORT))
        with server(command, port) as pid:
            url = f"http://127.0.0.1:{port}"
            bodies = [chat(user(text), tokens, stream)] * count
            uvloop.run(drive(url, iter(bodies[: count // 4]), CONCURRENCY))
            with measure({"floor": pid}) as used:
                uvloop.run(drive(url, iter(bodies), CONCURRENCY))
            if stream and not pace:
                first_token(report, url, bodies[0])
        factor = 1e6 / (count * tokens) if stream else 1e3 / count
        report.add(f"HTTP alone: {name}", used.total_s * factor, unit)


def first_token(report: Report, url: str, body: bytes) -> None:
    connection = Connection(url)
    firsts = [connection.stream(body).first_s * 1e3 for _ in range(200)]
    connection.close()
    report.add("HTTP alone: first token, p50", median(firsts), "ms")


def hops(report: Report) -> None:
    """Latency of a message through NATS, and the CPU of its server."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder,
        server(nats_command(Path(folder), port), port) as pid,
    ):
        for name, size in SIZES.items():
            sender, receiver = nats_socket(port, b""), nats_socket(port, b"SUB floor 1\r\n")
            message = b"PUB floor %d\r\n%b\r\n" % (size, os.urandom(size))
            before, times = cpu_seconds(pid), []
            for _ in range(HOPS):
                started = time.perf_counter()
                sender.sendall(message)
                left = len(b"MSG floor 1 %d\r\n\r\n" % size) + size
                while left:
                    left -= len(receiver.recv(left))
                times.append((time.perf_counter() - started) * 1e6)
            used = (cpu_seconds(pid) - before) / HOPS * 1e6
            report.add(f"NATS hop, {name}: p50", median(times), "µs")
            report.add(f"NATS hop, {name}: the server", used, "CPU µs")
            sender.close()
            receiver.close()


def nats_socket(port: int, subscribe: bytes) -> socket.socket:
    """A connected client without a library."""
    client = socket.create_connection(("127.0.0.1", port), 10)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(b'CONNECT {"verbose":false}\r\n' + subscribe + b"PING\r\n")
    seen = b""
    while not seen.endswith(b"PONG\r\n"):
        seen += client.recv(1 << 16)
    return client


def stages(report: Report) -> None:
    """The frontend's own code for a turn of 40K tokens and for a token of a stream."""
    model = served()
    turn_stages(report, model, conversation(prompts(1, 300), 40_000, 12))
    token_path(report, model)


async def placements(nats_url: str) -> list[float]:
    """Milliseconds of each placement."""
    bus = await Bus.connect(BusOptions(url=nats_url), "benchmark")
    times = []
    for index in range(PLACEMENTS):
        tokens = b"".join((index * 4096 + i).to_bytes(4, "little") for i in range(2048))
        sequence = bytes(block_hashes(tokens, 16, salt(MODEL))[1])
        request = RouteRequest(
            request=f"bench-{index}",
            model=MODEL,
            sequence_hashes=sequence,
            tokens=2048,
            max_tokens=1,
            deadline_s=5.0,
        )
        started = time.perf_counter()
        await bus.request(bus.subjects.router(MODEL), request, ROUTE_REPLY, 5.0)
        times.append((time.perf_counter() - started) * 1e3)
        freed = SeqBatch(source="benchmark", events=[SeqFree(request=request.request)])
        bus.post(bus.subjects.seq(MODEL), freed)
    await bus.close()
    return times


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    report = Report("Floors")
    http(report)
    hops(report)
    stages(report)
    with running_mesh() as mesh:
        report.add("a placement: p50", median(uvloop.run(placements(mesh.nats_url))), "ms")
    report.finish("floors", options.json)


if __name__ == "__main__":
    main()
