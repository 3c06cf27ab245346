"""A worker frozen beyond its lease: its requests have ended, its blocks stay in the index."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.wait import eventually
from support.worker import SALT, ScriptedFrontend, prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Instance, MessageDecoder, OverlapQuery, OverlapReply, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import block_hashes

BLOCKS = 6
MODEL = "kvmesh-demo"


@pytest.fixture
def lease_s() -> float:
    return 2.0


@pytest_asyncio.fixture
async def mesh(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> AsyncIterator[Mesh]:
    env = {**stream_env(limits), "KVMESH_MOCK_SPEEDUP": "1"}
    mesh = Mesh(nats_server.url, tmp_path, env, bus.options.namespace)
    yield mesh
    mesh.stop()


@pytest_asyncio.fixture
async def directory(bus: Bus, limits: StreamLimits) -> AsyncIterator[Directory]:
    directory = Directory(bus, limits)
    await directory.open()
    yield directory
    await directory.close()


async def joined(directory: Directory, name: str) -> str:
    found = await eventually(lambda: [c for c in directory.instances if c.name == name])
    return found[0].instance


async def indexed_depths(bus: Bus, prompts: list[bytes]) -> list[int]:
    """Number of leading blocks of each prompt that the index knows."""
    query = OverlapQuery([block_hashes(tokens, 16, SALT)[1] for tokens in prompts])
    try:
        reply = await bus.request(
            bus.subjects.index(MODEL), query, MessageDecoder(OverlapReply), 10
        )
    except BusError as error:
        raise AssertionError(f"no answer: {error}") from error
    rows = [memoryview(row).cast("I").tolist() for row in reply.rows]
    return [sum(row[1:5]) for row in rows]


async def test_a_thawed_worker_aborts_its_requests_and_the_index_recovers(
    bus: Bus, frontend: ScriptedFrontend, mesh: Mesh, directory: Directory
) -> None:
    mesh.start("indexer", "i")
    mesh.start("worker", "w")
    instance = await joined(directory, "w")
    await joined(directory, "i")
    prompts = [prompt(16 * BLOCKS, first=700 * number + number) for number in range(6)]
    for number, tokens in enumerate(prompts[:4]):
        await frontend.dispatch(instance, work(f"r{number}", tokens, 2))
        await frontend.done(f"r{number}")
    await eventually(lambda: index_is(bus, prompts, [BLOCKS] * 4 + [0, 0]))
    await frontend.dispatch(instance, work("long", prompts[4], 5000))
    await eventually(lambda: "long" in frontend.chunks)
    process = mesh.processes["w"]
    process.send_signal(signal.SIGSTOP)
    try:
        await eventually(lambda: "w" not in {card.name for card in directory.instances})
        await eventually(lambda: index_is(bus, prompts, [0] * 6), what="the index has dropped it")
    finally:
        process.send_signal(signal.SIGCONT)
    assert await joined(directory, "w") == instance
    assert await eventually(lambda: frontend.finish("long")) == "abort"
    await eventually(lambda: not frontend.loads[-1].running)
    await frontend.dispatch(instance, work("new", prompts[5], 2))
    await frontend.done("new")
    await eventually(lambda: index_is(bus, prompts, [BLOCKS] * 6), what="the index is right again")


async def index_is(bus: Bus, prompts: list[bytes], truth: list[int]) -> bool:
    assert await indexed_depths(bus, prompts) == truth
    return True


async def test_a_stopping_frontend_keeps_its_requests(
    bus: Bus, frontend: ScriptedFrontend, mesh: Mesh, directory: Directory, limits: StreamLimits
) -> None:
    mesh.start("worker", "w")
    instance = await joined(directory, "w")
    card = Instance(instance="front", role=Role.FRONTEND, name="f", version="0", started=0.0)
    lease = Lease(bus, card, limits)
    await lease.open()
    await asyncio.gather(
        *(frontend.dispatch(instance, work(f"r{n}", prompt(20), 300)) for n in range(3))
    )
    await lease.close()
    for number in range(3):
        assert len(await frontend.done(f"r{number}")) == 300
        assert frontend.finish(f"r{number}") == "length"
