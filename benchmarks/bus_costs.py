"""CPU of each message on the bus: sender, NATS and receiver, in floods and one at a time.

Starts a NATS server with one thread, as `kvmesh up` does on two cores, and a process per sender and
receiver. "One at a time" has a pause after each message, so that every process sleeps before it, as
with paced tokens; there the wake-ups count, not the message. The last part is a request with its
reply, beside the same over plain nats-py.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import nats
import uvloop
from common import Interval, Report, measure, median, parser
from local_mesh import free_port, nats_command, wait_for_port
from nats.aio.msg import Msg

from kvmesh.bus.client import Bus, BusOptions, returning
from kvmesh.bus.messages import (
    Chunk,
    Dump,
    KvBatch,
    Load,
    MessageDecoder,
    StepOutput,
    Stored,
    encode,
)
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

INSTANCE = "worker-0-4f6b2a"
SUBJECT = "kvm.kvmesh.bench.w"
FLOOD, MANY, PACED = "flood", "flood of 200 connections", "one at a time"
FLUSHED = 64  # messages of a flood between waits for the server
CONNECTIONS = 200
PAUSE_S = 0.0025  # four workers with a step each 10 ms
ANSWER_S = 10.0


def step(chunks: int) -> StepOutput:
    return StepOutput(
        INSTANCE, [Chunk(f"chatcmpl-{n:024x}", 100, [5000 + n]) for n in range(chunks)]
    )


def batch(blocks: int) -> KvBatch:
    one = [Stored(0, 7, bytes(8), bytes(8)) for _ in range(blocks)]
    return KvBatch("worker-0", INSTANCE, 0, 1, time.time(), list(one))


LOAD = Load(
    instance=INSTANCE,
    rank=0,
    running=8,
    waiting=0,
    active_blocks=400,
    cached_blocks=9000,
    total_blocks=16384,
    prefill_tokens=0,
    steps=100_000,
    prompt_tokens=10_000_000,
    cached_tokens=8_000_000,
    output_tokens=1_000_000,
    requests=5000,
    step_s=0.01,
    busy_s=1000.0,
)
MESSAGES: dict[str, object] = {
    "tokens of 1 stream": step(1),
    "tokens of 8 streams": step(8),
    "tokens of 32 streams": step(32),
    "load to 4 receivers": LOAD,
    "batch of 4 KV events": batch(4),
}
RECEIVERS = {"load to 4 receivers": 4}
TYPES: dict[str, type] = {"tokens": StepOutput, "load": Load, "batch": KvBatch}


# --- the processes: each prints a line when it is ready or done, and reads one to begin


async def receive(url: str, name: str) -> None:
    """Decode each message; those of the stream come from a reader of it."""
    bus = await Bus.connect(BusOptions(url=url), "receiver")
    decoder: MessageDecoder[object] = MessageDecoder(TYPES[name.split()[0]])
    if name.startswith("batch"):

        def read(message: StreamMessage) -> None:
            decoder.decode(message.data)

        subjects = bus.subjects
        await StreamReader(bus, subjects.kv_stream, subjects.kv_all, read, Start(new=True)).open()
    else:
        await bus.subscribe(SUBJECT, decoder, lambda _: None)
    await bus.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def send(url: str, name: str, count: int, form: str) -> None:
    made = CONNECTIONS if form == MANY else 1
    buses = [await Bus.connect(BusOptions(url=url), "sender") for _ in range(made)]
    bus, stored = buses[0], name.startswith("batch")
    if stored:
        await ensure_streams(bus)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    subject, message = bus.subjects.kv("m", "worker-0"), MESSAGES[name]
    together = {PACED: 1, FLOOD: FLUSHED, MANY: CONNECTIONS}[form]
    for first in range(0, count, together):
        senders = [buses[n % made] for n in range(first, min(first + together, count))]
        if stored:
            data = encode(message)
            await asyncio.gather(*(each.store(subject, data, ANSWER_S) for each in senders))
        else:
            for each in senders:
                each.post(SUBJECT, message)
        if form == PACED:
            await asyncio.sleep(PAUSE_S)
        elif not stored:
            await bus.flush()
    await bus.flush()
    await asyncio.sleep(0.2)
    print("done", flush=True)
    await asyncio.Event().wait()


async def answer(url: str, plain: bool) -> None:
    if plain:
        client = await nats.connect(url)

        async def reply(msg: Msg) -> None:
            await msg.respond(msg.data)

        await client.subscribe(SUBJECT, cb=reply)
        await client.flush()
    else:
        bus = await Bus.connect(BusOptions(url=url), "receiver")
        await bus.serve(SUBJECT, MessageDecoder(Dump), returning(lambda request: request))
        await bus.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def ask(url: str, plain: bool, count: int) -> None:
    """One request after another; prints the median of their times in ms."""
    client = await nats.connect(url) if plain else None
    bus = await Bus.connect(BusOptions(url=url), "sender")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    request, decoder, times = Dump(0), MessageDecoder(Dump), []
    data = encode(request)
    for _ in range(count):
        started = time.perf_counter()
        if client is not None:
            decoder.decode((await client.request(SUBJECT, data, timeout=ANSWER_S)).data)
        else:
            await bus.request(SUBJECT, request, decoder, ANSWER_S)
        times.append((time.perf_counter() - started) * 1e3)
    print(json.dumps(median(times)), flush=True)
    await asyncio.Event().wait()


# --- the measurement


@dataclass
class Server:
    url: str
    pid: int


@contextmanager
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        port = free_port()
        environment = {"GOMAXPROCS": "1"}
        with subprocess.Popen(nats_command(Path(folder), port), env=environment) as process:
            try:
                wait_for_port(port)
                yield Server(f"nats://127.0.0.1:{port}", process.pid)
            finally:
                process.terminate()


@contextmanager
def child(*arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def run(sender: "subprocess.Popen[str]", pids: dict[str, int]) -> tuple[Interval, str]:
    """Let the sender work; returns the use of all processes and the line it prints at the end."""
    assert sender.stdin is not None
    assert sender.stdout is not None
    with measure(pids) as used:
        sender.stdin.write("go\n")
        sender.stdin.flush()
        line = sender.stdout.readline()
    return used, line


def one_run(nats_server: Server, name: str, count: int, form: str) -> Interval:
    with ExitStack() as stack:
        sender = stack.enter_context(child("send", nats_server.url, name, count, form))
        pids = {"sender": sender.pid, "nats": nats_server.pid}
        for number in range(RECEIVERS.get(name, 1)):
            receiver = stack.enter_context(child("receive", nats_server.url, name))
            pids[f"receiver-{number}"] = receiver.pid
        return run(sender, pids)[0]


def hop_costs(report: Report, runs: int, count: int) -> None:
    for title, plain in (("plain nats-py", 1), ("this client", 0)):
        found: list[tuple[Interval, str]] = []
        with server() as nats_server:
            for _ in range(runs):
                with (
                    child("answer", nats_server.url, plain) as receiver,
                    child("ask", nats_server.url, plain, count) as sender,
                ):
                    pids = {"sender": sender.pid, "nats": nats_server.pid}
                    found.append(run(sender, {**pids, "receiver": receiver.pid}))
        times = [float(line) for _, line in found]
        report.add_runs(f"request and reply, {title}: p50", times, "ms")
        for role in ("sender", "nats", "receiver"):
            costs = [used.of(role) / count * 1e6 for used, _ in found]
            report.add_runs(f"    {role}", costs, "CPU µs/request")


def start_child(what: str, url: str, *rest: str) -> None:
    if what == "receive":
        uvloop.run(receive(url, rest[0]))
    elif what == "send":
        uvloop.run(send(url, rest[0], int(rest[1]), rest[2]))
    elif what == "answer":
        uvloop.run(answer(url, rest[0] == "1"))
    else:
        uvloop.run(ask(url, rest[0] == "1", int(rest[1])))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        start_child(*sys.argv[2:])
        return 0
    arguments = parser(__doc__ or "")
    arguments.add_argument("--quick", action="store_true", help="one short run of each")
    options = arguments.parse_args()
    runs, flood, paced = (1, 10_000, 400) if options.quick else (3, 30_000, 1200)
    report = Report("Messages on the bus")
    for name, message in MESSAGES.items():
        for form, count in ((FLOOD, flood), (MANY, flood), (PACED, paced)):
            with server() as nats_server:
                found = [one_run(nats_server, name, count, form) for _ in range(runs)]
            report.add(f"{name}, {form}", float(len(encode(message))), "bytes")
            for role in ("sender", "nats", "receiver"):
                shared = RECEIVERS.get(name, 1) if role == "receiver" else 1
                costs = [used.of(role) / count / shared * 1e6 for used in found]
                report.add_runs(f"    {role}", costs, "CPU µs/message")
    hop_costs(report, runs, 2000)
    report.finish("CPU of messages on the bus, by process", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
