"""CPU of an `EventFeed` per stored block, in the forms of vLLM and SGLang, beside another build.

    .venv/bin/python benchmarks/engine_events.py --build CHECKOUT [--rounds 5]

A process of each build follows a publisher over ZeroMQ and packs what the ledger says into batches
of the KV stream, which a bus without a server accepts. Its whole CPU counts, with ZeroMQ's thread.
The publisher sends messages of 1, 32 and 512 blocks at a steady rate; *evicting* ones remove as
many blocks as they store. The floods are 1,000 messages a second that can, and cannot, be decoded.
The builds take turns in one run, in an order that is reversed each round.
"""

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop
import zmq
from common import Report, cpu_seconds, median, parser
from local_mesh import python_of

from kvmesh.bus.messages import KvEvent, Sampling, Stored, Work
from kvmesh.bus.metrics import BusCounts
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.worker.engine import EngineError, OutputDelta

SIZE = 16  # tokens per block
HELD = 16_384  # blocks, before evicting messages remove any
PROMPT_BLOCKS = 256
WAIT_S = 60.0
INTERVAL_S = 0.01  # between batches of the KV stream
# blocks of a message: messages per second, messages
RATES = {1: (1000, 4000), 32: (400, 1600), 512: (40, 160)}
FLOOD = 1000, 4000, 8  # messages per second, messages, blocks of each


@dataclass(frozen=True)
class Case:
    """Messages of one form; `fault` is the kind of those that cannot be decoded."""

    form: str
    blocks: int
    evicting: bool = False
    fault: str = ""
    flood: bool = False

    @property
    def name(self) -> str:
        if self.flood:
            return f"{self.form}: flood, {self.fault or 'decodable'}"
        return f"{self.form}: {self.blocks} blocks" + (", evicting" if self.evicting else "")

    @property
    def pace(self) -> tuple[int, int]:
        return FLOOD[:2] if self.flood else RATES[self.blocks]


FAULTS = ("cut off", "of another type", "nonsense")
CASES = [
    *(
        Case(form, blocks, e)
        for form in ("vllm", "sglang")
        for blocks in RATES
        for e in (False, True)
    ),
    *(
        Case(form, FLOOD[2], fault=fault, flood=True)
        for form in ("vllm", "sglang")
        for fault in ("", *FAULTS)
    ),
]


def stored(
    form: str, hashes: list[int], parent: int | None, tokens: list[int], salt: str
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
    }
    if form == "sglang":
        return event | {"cache_salt": salt}
    keys = [[salt] if parent is None else None, *([None] * (len(hashes) - 1))]
    return event | {"lora_name": None, "extra_keys": keys, "group_idx": 0}


def removed(form: str, hashes: list[int]) -> list[dict[str, Any]]:
    """vLLM publishes one event per block, SGLang one per run of blocks."""
    event: dict[str, Any] = {"type": "BlockRemoved", "medium": "GPU"}
    if form == "sglang":
        return [event | {"block_hashes": hashes}]
    return [event | {"block_hashes": [one], "group_idx": 0} for one in hashes]


def messages(case: Case, salt: str, seed: int) -> Iterator[bytes]:
    """Prompts one after the other, each in as many messages as it takes."""
    random = Random(seed)
    low, high = (-(1 << 63), (1 << 63) - 1) if case.form == "sglang" else (0, (1 << 64) - 1)
    parent: int | None = None
    left = max(PROMPT_BLOCKS, case.blocks)
    held: deque[int] = deque()
    while True:
        hashes = [random.randint(low, high) for _ in range(case.blocks)]
        tokens = random.choices(range(150_000), k=SIZE * case.blocks)
        events = [stored(case.form, hashes, parent, tokens, salt)]
        parent = hashes[-1]
        left -= case.blocks
        if left <= 0:
            parent, left = None, max(PROMPT_BLOCKS, case.blocks)
        if case.evicting:
            held.extend(hashes)
            gone = [held.popleft() for _ in range(case.blocks) if len(held) > HELD // 8]
            events += removed(case.form, gone) if gone else []
        yield broken(msgspec.msgpack.encode([time.time(), events, 0]), events, case.fault)


def broken(payload: bytes, events: list[dict[str, Any]], fault: str) -> bytes:
    """The payload with a fault near its end, of as many bytes; unchanged without one."""
    if fault == "cut off":
        return payload[:-4]
    if fault == "nonsense":
        return bytes([0xC1]) * len(payload)
    if fault == "of another type":
        events[-1]["token_ids"][-1] = -1
        return msgspec.msgpack.encode([time.time(), events, 0])
    return payload


class Packer:
    """The sink of a worker, with its publisher, over a bus that accepts every batch."""

    def __init__(self) -> None:
        self.publisher: KvPublisher | None = None
        self.blocks = 0

    def events(self, rank: int, events: list[KvEvent]) -> None:
        self.blocks += sum(len(event.engine) // 8 for event in events if isinstance(event, Stored))
        if self.publisher is not None:
            self.publisher.add(rank, events)

    def output(self, deltas: list[OutputDelta]) -> None: ...

    def events_lost(self, rank: int, count: int) -> None: ...

    def failed(self, error: EngineError) -> None: ...


class OpenBus:
    """A bus without a server."""

    connected = True
    max_payload = 8 << 20

    def __init__(self) -> None:
        self.counts = BusCounts()
        self.on_reconnect: list[Any] = []
        self.kv_backlogs: set[Any] = set()

    async def store(self, subject: str, payload: bytes, timeout: float) -> None:
        """Accept a batch."""


def of_build(*modules: str) -> Any:
    """The first of these modules of the adapters that the build has: they have moved."""
    for name in modules:
        with suppress(ModuleNotFoundError):
            return import_module(f"kvmesh.worker.adapters.{name}")
    raise RuntimeError(f"the build has none of {', '.join(modules)}")


async def follow(endpoint: str) -> None:
    """Follow the publisher; print the salt of a tenant, then what has arrived at each line read."""
    logging.basicConfig(filename=os.devnull)
    ledgers = of_build("kv_events.ledger", "cache_ledger")
    salts = of_build("kv_events.salts", "cache_ledger").PromptSalts("m", SIZE)
    feeds = of_build("kv_events.feed", "event_feed")
    payloads = 0

    class Feed(feeds.EventFeed):  # type: ignore[misc, name-defined]
        def _on_payload(self, payload: bytes) -> None:
            nonlocal payloads
            payloads += 1
            super()._on_payload(payload)

    sink = Packer()
    feed = Feed(0, ledgers.CacheLedger(SIZE, salts.root_salt), sink, endpoint)
    bus: Any = OpenBus()
    publisher = sink.publisher = KvPublisher(bus, "s", "w", "i", INTERVAL_S, lambda rank: None)
    publisher.start()
    feed.start()
    sampling = Sampling(max_tokens=1)
    work = Work(request="r", frontend="f", tokens=b"", sampling=sampling, salt=1, tenant="tenant")
    print(salts.cache_salt(work), flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(sink.blocks, payloads, publisher.published, flush=True)
    await feed.close()


class Follower:
    """The process of a build that follows `endpoint`."""

    def __init__(self, checkout: Path | None, endpoint: str) -> None:
        self._process = subprocess.Popen(
            [python_of(checkout), __file__, "--follow", endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.salt = self._process.stdout.readline().strip()

    def arrived(self) -> tuple[int, int]:
        """Blocks and messages so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        blocks, payloads, _ = map(int, self._process.stdout.readline().split())
        return blocks, payloads

    @property
    def cpu_s(self) -> float:
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)


def until(follower: Follower, blocks: int, payloads: int) -> None:
    """Wait for so many; raises RuntimeError where other numbers have arrived."""
    deadline = time.monotonic() + WAIT_S
    while (found := follower.arrived()) != (blocks, payloads):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{found} of {blocks, payloads} blocks and messages have arrived")
        time.sleep(0.1)


def measure(case: Case, checkout: Path | None, seed: int) -> float:
    """CPU µs per block, or of a flood per message."""
    rate, count = case.pace
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        socket = context.socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(endpoint := f"ipc://{folder}/events")
        follower = Follower(checkout, endpoint)
        prepared = list(zip(range(count), messages(case, follower.salt, seed), strict=False))
        try:
            if not socket.poll(int(WAIT_S * 1e3)):
                raise RuntimeError("the follower does not subscribe; its checkout needs pyzmq")
            socket.recv()  # the subscription
            until(follower, 0, 0)
            before = follower.cpu_s
            started = time.perf_counter()
            for number, payload in prepared:
                time.sleep(max(0.0, started + number / rate - time.perf_counter()))
                socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            until(follower, 0 if case.fault else count * case.blocks, count)
            spent = follower.cpu_s - before
        finally:
            follower.close()
            socket.close(linger=0)
    return 1e6 * spent / (count * (1 if case.flood else case.blocks))


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--follow", metavar="ENDPOINT", help="what a measured process runs")
    arguments.add_argument("--build", type=Path, metavar="CHECKOUT", help="the other build")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", default="", help="a part of the cases' names")
    options = arguments.parse_args()
    if options.follow:
        uvloop.run(follow(options.follow))
        return
    report = Report("CPU of an event feed", "the other build")
    for case in CASES:
        if options.only not in case.name:
            continue
        runs: dict[Path | None, list[float]] = {None: [], options.build: []}
        for number in range(options.rounds):
            for checkout in list(runs)[:: 1 if number % 2 else -1]:
                runs[checkout].append(measure(case, checkout, number))
        other = median(runs[options.build])
        ratio = median(a / b for a, b in zip(runs[None], runs[options.build], strict=True))
        unit = "µs/message" if case.flood else "µs/block"
        report.add_runs(case.name, runs[None], unit, f"{other:.3g}", f"ratio {ratio:.2f}")
        print(f"{case.name}: ratio {ratio:.2f}", flush=True)
    report.finish("ratio: this build's CPU of the other's", options.json)


if __name__ == "__main__":
    main()
