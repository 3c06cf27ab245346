"""Blocks that a torch worker stores in lower tiers before it leaves, for the others of its node."""

import asyncio
import json
import signal
import urllib.request
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from support.mesh import Mesh
from support.nats import NatsServer
from support.small_kvbm import SmallKvbm
from support.tiny import tiny_model
from support.torch_tiers import Host, make_work
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, Offer, Pin
from kvmesh.bus.streams.configuration import StreamLimits

Start = Callable[..., Awaitable[Host]]
BLOCKS = 6
LIMIT = 4  # blocks that wait for write-through, fewer than a prompt has


def prompt(seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(8000) for _ in range(BLOCKS * 16 + 4)]


@pytest_asyncio.fixture
async def kvbm(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[SmallKvbm]:
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    yield kvbm
    await kvbm.stop()


@pytest_asyncio.fixture
async def start(bus: Bus, limits: StreamLimits) -> AsyncIterator[Start]:
    hosts: list[Host] = []

    async def begin(name: str, queue: int = 4096) -> Host:
        host = Host(bus, limits, name, queue=queue)
        hosts.append(host)
        await host.start()
        return host

    yield begin
    for host in hosts:
        await host.engine.close()


async def test_what_waits_is_written_before_the_engine_closes(
    kvbm: SmallKvbm, start: Start
) -> None:
    one, two = await start("w-1"), await start("w-2")
    tokens = {f"r{seed}": prompt(seed) for seed in range(4)}
    for name, each in tokens.items():
        one.engine.submit(make_work(name, each, 1))
    await one.engine.drain()
    assert not one.lower_tiers.writer.idle
    assert await one.engine.hand_down(PATIENCE_S) == 0
    await one.engine.close()
    for name, each in tokens.items():
        await two.run(make_work(name, each, 1))
        assert two.cached(name) == [0, BLOCKS * 16]
        assert two.answer(name) == one.answer(name)


async def test_skipped_blocks_are_written_the_most_valuable_and_latest_first(
    kvbm: SmallKvbm, start: Start
) -> None:
    host = await start("w-1", queue=LIMIT)
    for seed in range(4):
        await host.run(make_work(f"r{seed}", prompt(seed), 1))
    await host.written()
    skipped = host.lower_tiers.counts.skipped
    assert skipped >= 4 * BLOCKS
    assert kvbm.blocks == {}
    hashes = {seed: sequence(host, f"r{seed}") for seed in range(4)}
    await host.engine.pin(Pin(id="p", sequence_hashes=hashes[1], ttl_s=60.0))
    assert await host.engine.hand_down(PATIENCE_S) == 0
    offers = [request for request in kvbm.requests if isinstance(request, Offer)]
    order = [next(s for s, h in hashes.items() if h == each.sequence_hashes) for each in offers]
    assert order == [1, 3, 2, 0]
    await eventually(lambda: len(kvbm.blocks) == 4 * BLOCKS)
    assert await host.engine.hand_down(PATIENCE_S) == 0
    await host.check_accounting()


async def test_blocks_that_were_evicted_are_left_out(kvbm: SmallKvbm, start: Start) -> None:
    host = await start("w-1", queue=LIMIT)
    for seed in range(2):
        await host.run(make_work(f"r{seed}", prompt(seed), 1))
    await host.written()
    await host.engine.clear(Clear())
    await host.run(make_work("last", prompt(2)[:50], 1))
    assert await host.engine.hand_down(PATIENCE_S) == 0
    await eventually(lambda: len(kvbm.blocks) == 3)
    assert sum(isinstance(request, Offer) for request in kvbm.requests) == 1


async def test_a_kvbm_that_was_restarted_gets_the_blocks_again(
    kvbm: SmallKvbm, start: Start, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> None:
    host = await start("w-1")
    await host.run(make_work("r", prompt(), 1))
    await host.written()
    await host.engine.hand_down(PATIENCE_S)
    assert sum(isinstance(request, Offer) for request in kvbm.requests) == 1, "they are written"
    await kvbm.stop()
    other = SmallKvbm(bus, limits, tmp_path, instance="kvbm-2")
    await other.start()
    await host.attached(2)
    assert other.blocks == {}
    assert await host.engine.hand_down(PATIENCE_S) == 0
    await eventually(lambda: len(other.blocks) == BLOCKS)
    await other.stop()


async def test_the_time_is_bounded(kvbm: SmallKvbm, start: Start) -> None:
    host = await start("w-1")
    kvbm.silent = {Offer}
    await host.run(make_work("r", prompt(), 1))
    assert await host.engine.hand_down(0.1) == BLOCKS
    await kvbm.stop()
    await eventually(lambda: not host.lower_tiers.available)
    assert await host.engine.hand_down(PATIENCE_S) == 0, "there is nothing to hand down to"


def sequence(host: Host, name: str) -> bytes:
    item = host.lower_tiers._recent.peek(name)
    assert item is not None
    return array("Q", item.hashes).tobytes()


# --- real processes


@pytest.fixture
def mesh(nats_server: NatsServer, tmp_path: Path) -> Iterator[Mesh]:
    env = {
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(tiny_model()),
        "KVMESH_WORKER_NODE": "here",
        "KVMESH_TORCH_THREADS": "1",
        "KVMESH_TORCH_BLOCKS": "512",
        "KVMESH_KVBM_NODE": "here",
        "KVMESH_KVBM_DIRECTORY": str(tmp_path / "node"),
        "KVMESH_KVBM_HOST_BYTES": str(64 << 20),
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def complete(mesh: Mesh, text: str) -> tuple[str, int]:
    """The answer and the cached tokens of its prompt."""
    body: dict[str, Any] = {"model": mesh_model(), "prompt": text, "max_tokens": 4}
    request = urllib.request.Request(
        f"{mesh.url}/v1/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["text"], details.get("cached_tokens", 0)


def mesh_model() -> str:
    return tiny_model().name


async def test_a_worker_that_drains_after_a_request_leaves_its_blocks_to_the_next(
    mesh: Mesh,
) -> None:
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    mesh.start("kvbm", "kv")
    mesh.start("worker", "first")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    text = "Each worker tells what it keeps, and hands it down before it goes. " * 20

    async def loads() -> bool:
        """True once the worker is attached: its blocks are then written through."""
        await asyncio.to_thread(complete, mesh, "a short prompt to find out " * 8)
        return "attached to" in mesh.logs()

    await eventually(loads, what="the worker is attached to the kvbm")
    answer, cached = await asyncio.to_thread(complete, mesh, text)
    assert cached == 0
    process = mesh.processes.pop("first")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    mesh.start("worker", "second")
    await mesh.ready()
    again, cached = await asyncio.to_thread(complete, mesh, text)
    assert again == answer
    assert cached > 200
