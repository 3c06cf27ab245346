"""Many mock engines in one process: each is a worker of its own."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually
from support.worker import prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import (
    Instance,
    Load,
    MessageDecoder,
    Placement,
    Role,
    Sampling,
    WorkReply,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.router import KvRouter

ENGINES = 5
MODEL = "kvmesh-demo"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "20", "KVMESH_MOCK_ENGINES": str(ENGINES)}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    mesh.start_all(workers=1)
    await mesh.ready()
    await eventually(lambda: mesh.live_workers() == ENGINES)
    yield mesh
    mesh.stop()


async def test_every_engine_serves_and_knows_its_own_blocks(mesh: Mesh) -> None:
    async with KvRouter.connect(MODEL, mesh.options, timeout=30) as router:
        await eventually(lambda: _all_known(router))
        instances = [load["worker_id"] for load in await router.get_potential_loads([1] * 64)]
        for number, instance in enumerate(instances):
            prompt = [5 + number, *range(100, 300)]
            where = Placement(instance=instance)
            answer = [
                token
                async for part in router.generate(
                    prompt, sampling=Sampling(max_tokens=8), placement=where
                )
                for token in part["token_ids"]
            ]
            assert answer
            held = await router.best_worker(prompt, update_indexer=False)
            assert (held.worker_id, held.overlap_blocks) == (instance, len(prompt) // 16)


async def test_the_requests_of_a_dead_frontend_are_aborted_on_every_engine(mesh: Mesh) -> None:
    bus = await Bus.connect(mesh.options, "test")
    card = Instance(instance="gone", role=Role.FRONTEND, name="gone", version="0", started=0.0)
    lease = Lease(bus, card, StreamLimits())
    await lease.open()
    aborted: dict[str, int] = {}
    await bus.subscribe(
        bus.subjects.load_all,
        MessageDecoder(Load),
        lambda load: aborted.update({load.instance: load.aborted}),
    )
    await eventually(lambda: len(aborted) == ENGINES)
    endless = Sampling(max_tokens=100_000, ignore_eos=True)
    for number, instance in enumerate(aborted):
        item = work(f"r{number}", prompt(40), frontend="gone", sampling=endless)
        reply = await bus.request(bus.subjects.work(instance), item, MessageDecoder(WorkReply), 30)
        assert reply.status == "accepted"
    await lease.close()
    await eventually(lambda: list(aborted.values()) == [1] * ENGINES)
    await bus.close()


async def test_a_drained_engine_leaves_alone_and_the_process_ends_cleanly(mesh: Mesh) -> None:
    drained = await mesh.command("fleet", "drain", "worker-0-3")
    assert drained.returncode == 0, drained.stderr
    await eventually(lambda: mesh.live_workers() == ENGINES - 1)
    process = mesh.processes.pop("worker-0")
    process.terminate()
    assert await asyncio.to_thread(process.wait, 60) == 0
    await eventually(lambda: mesh.live_workers() == 0)


async def _all_known(router: KvRouter) -> bool:
    return len(await router.get_potential_loads([1] * 64)) == ENGINES
