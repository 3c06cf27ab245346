"""Frozen and delayed block managers: clients notice a pause at most.

Two nodes have a block manager and a worker that really computes, with too little memory of its own
for the prompts of sixteen streams: it loads blocks from the node's manager and, as that has too
little memory for all of them as well, from the other node's. No request fails, every answer is the
one that its prompt always has, and workers compute the blocks that they cannot load.
"""

import asyncio
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.proxy import Proxy
from support.tiny import slow_model
from support.traffic import Traffic, distinct_prompts
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAUSE_S = 2.0  # visible to a client
SLACK_S = 4.0  # for slow machines
DELAY_S = 2.0
FROZEN_S = 4.0
LEND_S = 3.0
NODES = range(2)
RETRY_S = 180.0  # a path measured as slow, on a busy machine, counts as twice as fast every 20 s
HOST_BYTES = 8 << 20  # half of the requested prompts
BEHIND = "127.0.0.2"  # the first manager lends blocks here; the others use its proxy's address
RECEIVED = 'kvmesh_kvbm_moved_blocks_total{source="3",target="1"}'
ABANDONED = 'kvmesh_kvbm_failed_moves_total{source="3",target="1"}'


@dataclass
class Stage:
    """The nodes.

    `proxy` is between the bus and the manager of the first node, `lending` between the manager of
    the other node and the blocks that the first node lends.
    """

    mesh: Mesh
    proxy: Proxy
    lending: Proxy
    ports: dict[str, int]
    answers: dict[str, str] = field(default_factory=dict)

    def count(self, name: str, metric: str) -> float:
        """A metric of one process."""
        url = f"http://127.0.0.1:{self.ports[name]}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith(metric))
        return sum(float(value) for _, _, value in found)

    def loaded(self) -> float:
        """Blocks that workers have loaded."""
        return sum(self.count(f"worker-{n}", "kvmesh_worker_onboarded_blocks_total") for n in NODES)

    def lent(self) -> float:
        return self.count("kvbm-0", "kvmesh_kvbm_lent_blocks_total")

    def received(self) -> float:
        """Blocks of the first node that the other one has received."""
        return self.count("kvbm-1", RECEIVED)

    def abandoned(self) -> float:
        """Blocks of the first node whose read the other one has given up."""
        return self.count("kvbm-1", ABANDONED)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("tiers")
    # a given-up read stays lent for this long: most of the little memory of its owner
    lent = {"KVMESH_TRANSFER_LEND_S": str(LEND_S)}
    mesh = Mesh(nats_server.url, folder, {"KVMESH_TRANSFER_VIA": "tcp", **lent})
    proxy, port = Proxy(nats_server.port), free_port()
    lending = Proxy(port, BEHIND, listen=port)
    stage = Stage(mesh, proxy, lending, {})
    proxy.start()
    lending.start()
    proxied = {
        "KVMESH_NATS_URL": proxy.url,
        "KVMESH_TRANSFER_HOST": BEHIND,
        "KVMESH_TRANSFER_PORT": str(port),
        "KVMESH_TRANSFER_ADVERTISE": "127.0.0.1",
    }
    try:
        mesh.start("indexer", "indexer-0")
        # in turn, each client would always get the same worker, whose manager has all its blocks
        mesh.start("router", "router-0", KVMESH_ROUTER_POLICY="random")
        for number in NODES:
            start_node(stage, number, proxied if number == 0 else {})
        mesh.start("frontend", "frontend-0")
        await mesh.ready()
        yield stage
    finally:
        mesh.stop()
        proxy.stop()
        lending.stop()


def start_node(stage: Stage, number: int, own: dict[str, str]) -> None:
    stage.ports |= {f"{role}-{number}": free_port() for role in ("kvbm", "worker")}
    mesh, node = stage.mesh, f"node-{number}"
    kvbm = {
        "KVMESH_KVBM_NODE": node,
        "KVMESH_KVBM_DIRECTORY": str(mesh.folder / node),
        "KVMESH_KVBM_HOST_BYTES": str(HOST_BYTES),
        "KVMESH_KVBM_PEERS": "true",
        "KVMESH_KVBM_METRICS_PORT": str(stage.ports[f"kvbm-{number}"]),
    }
    mesh.start("kvbm", f"kvbm-{number}", **kvbm, **own)
    worker = {
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(slow_model()),
        "KVMESH_WORKER_SERVED_NAME": "tiny",
        "KVMESH_WORKER_NODE": node,
        "KVMESH_WORKER_METRICS_PORT": str(stage.ports[f"worker-{number}"]),
        "KVMESH_TORCH_BLOCKS": "300",
        "KVMESH_TORCH_THREADS": "1",
    }
    mesh.start("worker", f"worker-{number}", **worker)


@asynccontextmanager
async def traffic_of(stage: Stage) -> AsyncIterator[Traffic]:
    """Clients at work, while workers load blocks.

    Asserts at the end that no request failed, pauses were short, and blocks move again.
    """
    prompts = distinct_prompts(3)
    clients = Traffic(stage.mesh.url, prompts, tokens=16, model="tiny", answers=stage.answers)
    async with clients:
        await eventually_increases(stage.loaded)
        yield clients
        await clients.wait_for_outputs()
        await eventually_increases(stage.loaded)
    clients.check(PAUSE_S + SLACK_S)
    running = "kvmesh_worker_running_requests"
    await eventually(
        lambda: stage.mesh.metric(running) == 0, what="no request runs without a client"
    )


async def eventually_increases(count: Callable[[], float]) -> None:
    before = await asyncio.to_thread(count)
    await eventually(lambda: count() > before, RETRY_S, "blocks move")


async def test_a_frozen_block_manager_is_bypassed_and_harmless_when_it_thaws(
    stage: Stage,
) -> None:
    async with traffic_of(stage) as traffic:
        await eventually(stage.lent, what="blocks come from the other node, too")
        process = stage.mesh.processes["kvbm-0"]
        process.send_signal(signal.SIGSTOP)
        try:
            await traffic.run_for(FROZEN_S)
        finally:
            process.send_signal(signal.SIGCONT)


async def test_a_block_manager_with_delayed_packets_is_bypassed(
    stage: Stage,
) -> None:
    async with traffic_of(stage) as traffic:
        stage.proxy.delay_s = DELAY_S
        try:
            await traffic.run_for(FROZEN_S)
        finally:
            stage.proxy.delay_s = 0.0


@pytest.mark.parametrize("held", [False, True], ids=["late", "held"])
async def test_blocks_that_another_node_sends_late_are_computed(stage: Stage, held: bool) -> None:
    async with traffic_of(stage) as traffic:
        await eventually_increases(stage.received)
        if held:
            stage.lending.hold()
        else:
            stage.lending.delay_s = DELAY_S
        try:
            lent, given_up = stage.lent(), stage.abandoned()
            requested = "blocks are requested"
            await eventually(lambda: stage.lent() > lent, RETRY_S, requested)
            await eventually(lambda: stage.abandoned() > given_up, what="they are bypassed")
            come = stage.received()
            await traffic.run_for(FROZEN_S)
            assert stage.received() == come, "nothing is so late that it is still waited for"
        finally:
            stage.lending.delay_s = 0.0
            stage.lending.release()
        await eventually_increases(stage.received)
