"""Delay of `/live` while a client sends compressed and oversized bodies, with and without a key.

Another process asks for `/live` every few milliseconds. For each body the script prints the slowest
answer to it, what that is over the slowest one of a quiet time, and the longest pause of the
frontend's event loop by the clock and in CPU time of its process.
"""

import gzip
import hashlib
import multiprocessing
import socket
import time
import zlib
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from random import Random
from statistics import median
from typing import NamedTuple

import zstandard
from hostile import ASK, CHAT, HEAD, MESSAGES
from local_mesh import Mesh, free_port, wait_for_port
from ticking_frontend import TICKS, Ticks

EVERY_S = 0.005
QUIET_S = 2.0
AFTER_S = 0.3
TIMEOUT_S = 60.0
CHUNK = 64 << 10
DECODED = 256 << 20
KEY = "hostile"
PATHS = (CHAT, MESSAGES, "/nowhere", "/health")


class CodedBody(NamedTuple):
    name: str
    coding: str
    body: bytes


class Sender(NamedTuple):
    """A frontend, and the headers of those who send to it."""

    name: str
    port: int
    ticks: Ticks
    headers: tuple[str, ...] = ()


class CodedResult(NamedTuple):
    """Status of a body, and seconds: the slowest `/live`, the longest pause, that in CPU time."""

    status: int
    live: float
    wall: float
    cpu: float


def coded_bodies(size: int) -> Iterator[CodedBody]:
    """Bombs of every coding, bodies of `size` bytes on the wire, and a plain one of 64 MiB."""
    zeros = b" " * DECODED
    gzipped = gzip.compress(zeros, 1)
    yield CodedBody("gzip bomb", "gzip", gzipped)
    yield CodedBody("deflate bomb", "deflate", zlib.compress(zeros, 1))
    yield CodedBody("zstd bomb", "zstd", zstandard.ZstdCompressor().compress(zeros))
    yield CodedBody("gzip bomb as br", "br", gzipped)
    yield CodedBody("gzip bomb in gzip", "gzip, gzip", gzip.compress(gzipped))
    noise = Random(0).randbytes(size)
    yield CodedBody("noise in gzip", "gzip", gzip.compress(noise, 1))
    yield CodedBody("noise in zstd", "zstd", zstandard.ZstdCompressor().compress(noise))
    text = HEAD + ASK[:-3] + b"word, " * (size // 6) + b'"}]}'
    yield CodedBody("a chat in zstd", "zstd", zstandard.ZstdCompressor().compress(text))
    yield CodedBody("64 MiB, plain", "identity", zeros[: 64 << 20])


def start_keyed_frontend(mesh: Mesh) -> Sender:
    """Start another frontend of the mesh, which needs a key."""
    keys, port = mesh.folder / "keys.toml", free_port()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "{KEY}"\nsha256 = "{digest}"\n')
    file = mesh.folder / "keyed-ticks"
    ticks = Ticks(file)
    options = {"KVMESH_FRONTEND_PORT": str(port), "KVMESH_FRONTEND_KEYS_FILE": str(keys)}
    mesh.add_service("frontend", "frontend-keyed", {**options, TICKS: str(file)})
    wait_for_port(port)
    return Sender("keys, none sent", port, ticks)


def poll(port: int, slowest: "Synchronized[float]") -> None:
    """Ask for `/live` until the process ends; `slowest` is the longest time of an answer."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            began = time.perf_counter()
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(CHUNK)
            slowest.value = max(slowest.value, time.perf_counter() - began)
            time.sleep(EVERY_S)


def post(sender: Sender, path: str, coded: CodedBody, chunked: bool) -> int:
    """Send the whole body, or until the connection is reset; returns the status, 0 for none."""
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(coded.body)}"
    lines = (f"Content-Encoding: {coded.coding}", "Content-Type: application/json", framing)
    head = (f"POST {path} HTTP/1.1", "Host: localhost", *lines, *sender.headers, "", "")
    answer = b""
    with socket.create_connection(("127.0.0.1", sender.port), TIMEOUT_S) as connection:
        try:
            connection.sendall("\r\n".join(head).encode())
            for start in range(0, len(coded.body), CHUNK):
                part = coded.body[start : start + CHUNK]
                connection.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
            answer = connection.recv(CHUNK)
        except ConnectionError:
            pass
    return int(answer[9:12] or 0)


def measure_coded(mesh: Mesh, ticks: Ticks, size: int, times: int) -> None:
    """Print the figures of every body, path, framing and sender; the worst ones at last."""
    keyed = start_keyed_frontend(mesh)
    senders = (
        Sender("no keys", mesh.ports[0], ticks),
        keyed,
        keyed._replace(name="key sent", headers=(f"Authorization: Bearer {KEY}",)),
    )
    bodies = list(coded_bodies(size))
    slowest = {port: multiprocessing.Value("d", 0.0) for port in (mesh.ports[0], keyed.port)}
    pollers = [
        multiprocessing.Process(target=poll, args=(port, value), daemon=True)
        for port, value in slowest.items()
    ]
    for poller in pollers:
        poller.start()
    print(f"{'coded body':<76}{'status':>7}{'/live':>10}{'over':>9}{'loop':>9}{'CPU':>9}")
    worst: list[CodedResult] = []
    for sender in senders:
        value = slowest[sender.port]
        quiet = median(_quiet(sender, value) for _ in range(times))
        print(f"{f'{sender.name}: (none)':<76}{'':>7}{quiet * 1e3:>7.1f} ms", flush=True)
        for coded in bodies:
            for path in PATHS:
                for chunked in (False, True):
                    seen = [_send(sender, value, path, coded, chunked) for _ in range(times)]
                    found = CodedResult(*map(median, zip(*seen, strict=True)))
                    framing = "chunked" if chunked else "length"
                    name = f"{sender.name}: {coded.name}, {framing}, {path}"
                    _row(name, found, quiet)
                    worst.append(found._replace(live=found.live - quiet))
    for poller in pollers:
        poller.kill()
    over, wall, cpu = (max(getattr(w, name) for w in worst) for name in ("live", "wall", "cpu"))
    print(
        f"slowest /live over a quiet time {over * 1e3:.0f} ms, longest pause {wall * 1e3:.0f} ms,"
        f" in CPU time {cpu * 1e3:.0f} ms"
    )


def _quiet(sender: Sender, slowest: "Synchronized[float]") -> float:
    slowest.value = 0.0
    time.sleep(QUIET_S)
    return slowest.value


def _send(
    sender: Sender, slowest: "Synchronized[float]", path: str, coded: CodedBody, chunked: bool
) -> CodedResult:
    slowest.value = 0.0
    sender.ticks.reset()
    status = post(sender, path, coded, chunked)
    time.sleep(AFTER_S)
    told = sender.ticks.read()
    return CodedResult(status, slowest.value, told.wall, told.cpu)


def _row(name: str, found: CodedResult, quiet: float) -> None:
    times = (found.live, found.live - quiet, found.wall, found.cpu)
    shown = "".join(f"{each * 1e3:>6.1f} ms" for each in times)
    print(f"{name:<76}{found.status:>7.0f} {shown}", flush=True)
