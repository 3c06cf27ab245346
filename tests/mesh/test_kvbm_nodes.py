"""Block managers of two nodes that share a store or memory: one loads what the other computes."""

import asyncio
import struct
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from support.kvbm import Names, TestWorker, find_kvbm, layout, tokens
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.redis import RedisServer
from support.wait import PATIENCE_S, eventually

from kvmesh.blocks.digests import KEY_BYTES, fingerprint
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NoResponder
from kvmesh.bus.messages import (
    Clear,
    ControlReply,
    KvLayout,
    MessageDecoder,
    OverlapQuery,
    OverlapReply,
)
from kvmesh.bus.streams.configuration import StreamLimits


@pytest.fixture
def limits(limits: StreamLimits) -> StreamLimits:
    """Limits with leases that a busy machine renews in time."""
    return replace(limits, lease_s=10.0)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["redis", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "none":
        return ""
    if request.param == "folder":
        return f"file://{tmp_path}/shared"
    server: RedisServer = request.getfixturevalue("redis")
    return server.url


PEERS = {"KVMESH_KVBM_PEERS": "true", "KVMESH_TRANSFER_VIA": "tcp"}


class Nodes:
    """A kvbm and a worker on each of some nodes."""

    def __init__(self, mesh: Mesh, bus: Bus, limits: StreamLimits) -> None:
        self.mesh = mesh
        self.bus = bus
        self.limits = limits
        self.workers: list[TestWorker] = []
        self.ports: dict[str, int] = {}

    async def start(self, name: str, shape: KvLayout | None = None, /, **env: str) -> TestWorker:
        self.ports[name] = free_port()
        self.mesh.start(
            "kvbm",
            name,
            KVMESH_KVBM_NODE=name,
            KVMESH_KVBM_DIRECTORY=str(self.mesh.folder / name),
            KVMESH_KVBM_METRICS_PORT=str(self.ports[name]),
            **env,
        )
        instances = {worker.card.instance for worker in self.workers}
        card = await find_kvbm(self.bus, self.limits, instances)
        worker = TestWorker(self.bus, card, shape or layout())
        self.workers.append(worker)
        await worker.attach()
        return worker

    async def clear(self, worker: TestWorker, *tiers: int) -> None:
        subject = self.bus.subjects.ctl(worker.card.instance)
        await self.bus.request(
            subject, Clear(tiers=list(tiers)), MessageDecoder(ControlReply), PATIENCE_S
        )

    def metric(self, node: str, sample: str) -> float:
        address = f"http://127.0.0.1:{self.ports[node]}/metrics"
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        wanted = f"kvmesh_kvbm_{sample} "
        return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))

    async def reaches(self, node: str, sample: str, value: float) -> None:
        def has_value() -> bool:
            return self.metric(node, sample) == value

        await eventually(
            lambda: asyncio.to_thread(has_value), what=f"{sample} of {node} is {value}"
        )

    async def indexed(self, names: Names, *blocks: int) -> None:
        """Wait until the index knows of nodes with so many blocks of a prompt in their memory."""
        subject, query = self.bus.subjects.index("m"), OverlapQuery([names.sequence])

        async def index_matches() -> bool:
            try:
                reply = await self.bus.request(
                    subject, query, MessageDecoder(OverlapReply), PATIENCE_S
                )
            except NoResponder:
                return False
            rows = struct.iter_unpack("<5I", reply.rows[0])
            return sorted(arena for _, _, arena, _, _ in rows) == sorted(blocks)

        await eventually(index_matches)

    async def shared(self, node: str, blocks: int) -> None:
        sample = 'blocks{tier="3"}'
        await eventually(
            lambda: self.metric(node, sample) == blocks, what=f"{blocks} blocks shared"
        )
        done = 'moving_blocks{source="1",target="3"}'
        await eventually(lambda: self.metric(node, done) == 0, what="no transfer in progress")


@pytest_asyncio.fixture
async def nodes(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, url: str, tmp_path: Path
) -> AsyncIterator[Nodes]:
    env = {
        "KVMESH_KVBM_HOST_BYTES": str(4 << 20),
        "KVMESH_KVBM_REMOTE_URL": url,
        "KVMESH_KVBM_REMOTE_FREQUENCY": "1",
        "KVMESH_KVBM_REMOTE_TIMEOUT_S": "2",
        **stream_env(limits),
    }
    nodes = Nodes(Mesh(nats_server.url, tmp_path, env, bus.options.namespace), bus, limits)
    yield nodes
    for worker in nodes.workers:
        worker.close()
    nodes.mesh.stop()


async def test_a_node_loads_blocks_of_another(nodes: Nodes) -> None:
    east = await nodes.start("east")
    names = east.names(tokens(50))
    await east.put(names)
    await nodes.shared("east", 50)
    west = await nodes.start("west")
    result = await west.get(names)
    assert (result.tiers, result.bad) == ([3] * 50, 0)
    assert (await west.get(names)).tiers == [1] * 50
    longer = west.names(tokens(60))
    assert await west.put(longer, 50) == 10
    await nodes.shared("west", 60)
    assert (await east.get(longer)).tiers == [1] * 50 + [3] * 10
    assert not (await east.get(east.names(tokens(10, 9)))).blocks


async def test_cleared_blocks_are_gone_everywhere(nodes: Nodes) -> None:
    east, west = await nodes.start("east"), await nodes.start("west")
    names = east.names(tokens(10))
    await east.put(names)
    await nodes.shared("east", 10)
    await nodes.clear(east)

    async def evicted() -> bool:
        """West may have loaded them just before they were gone; it then drops its own copies."""
        found = (await west.get(names)).blocks
        if found:
            await nodes.clear(west, 1)
        return not found

    await eventually(evicted)


@pytest.mark.parametrize("url", ["redis"], indirect=True)
async def test_a_node_continues_without_its_store(nodes: Nodes, redis: RedisServer) -> None:
    east = await nodes.start("east")
    names = east.names(tokens(10))
    await east.put(names)
    await nodes.shared("east", 10)
    await nodes.clear(east, 1)
    redis.kill()
    assert not (await east.get(names)).blocks
    assert await east.put(names) == 10
    assert len((await east.get(names)).blocks) == 10
    log = nodes.mesh.folder / "east.log"
    seeds = count(2)
    assert log.read_text().count("continuing without the remote tier") == 1
    redis.start()

    async def recovered() -> bool:
        await east.get(east.names(tokens(4, next(seeds))))
        return "the remote tier works again" in log.read_text()

    await eventually(recovered)


@pytest.mark.parametrize("url", ["folder"], indirect=True)
@pytest.mark.parametrize("forged", [False, True])
async def test_a_corrupt_or_forged_block_in_the_store_is_dropped(
    nodes: Nodes, forged: bool
) -> None:
    east = await nodes.start("east")
    names = east.names(tokens(10))
    await east.put(names)
    await nodes.shared("east", 10)
    await nodes.clear(east, 1)
    (file,) = nodes.mesh.folder.glob(f"shared/*/??/{names.digest(6).hex()}")
    if forged:  # another intact block, with its own checksum
        (other,) = nodes.mesh.folder.glob(f"shared/*/??/{names.digest(3).hex()}")
        content = bytearray(other.read_bytes())
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
    file.write_bytes(content)
    result = await east.get(names)
    assert (len(result.blocks), result.bad) == (6, 0)
    await eventually(lambda: not file.exists())
    assert nodes.metric("east", "corrupt_blocks_total") == 1


@pytest.mark.parametrize("url", ["none"], indirect=True)
async def test_a_node_reads_anothers_memory(nodes: Nodes) -> None:
    nodes.mesh.start("indexer", "indexer-0")
    east, west = await nodes.start("east", **PEERS), await nodes.start("west", **PEERS)
    prompts = [east.names(tokens(20, seed)) for seed in (1, 2)]
    for names in prompts:
        assert await east.put(names) == 20
    first, second = prompts

    async def loaded() -> bool:
        result = await west.get(first)
        assert not result.bad
        return result.tiers == [3] * 20

    await eventually(loaded)
    assert (await west.get(first)).tiers == [1] * 20
    await eventually(lambda: nodes.metric("east", 'used_bytes{tier="1"}') == 40 * 8192)
    assert nodes.metric("east", "lent_blocks_total") >= 20
    nodes.mesh.kill("east")
    assert not (await west.get(second)).blocks
    assert await west.put(second) == 20


async def compute(nodes: Nodes, east: TestWorker, names: Names) -> None:
    """Start computing a prompt in the east; wait until the west has its claim."""
    assert not (await east.get(names, request="r", wait_s=1.0)).blocks
    await nodes.reaches("west", "peer_claims", 1)


@pytest.mark.parametrize("url", ["none", "folder"], indirect=True)
async def test_a_node_waits_for_blocks_that_another_computes(nodes: Nodes, url: str) -> None:
    env = {"KVMESH_KVBM_REMOTE_FREQUENCY": "2"} if url else PEERS
    east, west = await nodes.start("east", **env), await nodes.start("west", **env)
    names = east.names(tokens(20))
    await compute(nodes, east, names)
    waiting = asyncio.create_task(west.get(names, wait_s=60.0))
    await nodes.reaches("west", "peer_waits_total", 1)
    assert await east.put(names.prefix(12)) == 12
    await nodes.reaches("west", 'blocks{tier="1"}', 12)
    assert await east.put(names, 12) == 8
    await east.computed("r")
    result = await waiting
    assert (result.tiers, result.bad) == ([3] * 20, 0)
    await nodes.reaches("west", "peer_claims", 0)
    assert nodes.metric("east", "prepared_blocks_total") == 20
    await nodes.reaches("west", "in_progress_blocks", 0)


@pytest.mark.parametrize("url", ["none"], indirect=True)
async def test_a_late_node_receives_current_claims(nodes: Nodes) -> None:
    env = {**PEERS, "KVMESH_KVBM_COMPUTE_PATIENCE_S": "3600"}  # claims are not renewed
    east = await nodes.start("east", **env)
    names = east.names(tokens(20))
    assert not (await east.get(names, request="r")).blocks
    west = await nodes.start("west", **env)
    await nodes.reaches("west", "peer_claims", 1)
    waiting = asyncio.create_task(west.get(names, wait_s=60.0))
    await nodes.reaches("west", "peer_waits_total", 1)
    assert await east.put(names) == 20
    await east.computed("r")
    assert (await waiting).tiers == [3] * 20
    await nodes.reaches("west", "peer_claims", 0)


@pytest.mark.parametrize("url", ["none"], indirect=True)
@pytest.mark.parametrize("end", ["gives up", "dies"])
async def test_waiting_ends_when_the_claimant_stops(nodes: Nodes, end: str) -> None:
    east, west = await nodes.start("east", **PEERS), await nodes.start("west", **PEERS)
    names = east.names(tokens(20))
    await compute(nodes, east, names)
    waiting = asyncio.create_task(west.get(names, wait_s=60.0))
    await nodes.reaches("west", "peer_waits_total", 1)
    if end == "dies":
        nodes.mesh.kill("east")
    else:
        await east.computed("r")
    async with asyncio.timeout(30):
        assert not (await waiting).blocks
    assert nodes.metric("west", "in_progress_blocks") == 20
    assert await west.put(names) == 20


@pytest.mark.parametrize("url", ["none"], indirect=True)
async def test_a_node_reads_anothers_disk(nodes: Nodes) -> None:
    disk = {
        "KVMESH_KVBM_DISK_PATH": str(nodes.mesh.folder / "disk"),
        "KVMESH_KVBM_DISK_BYTES": str(8 << 20),
        "KVMESH_KVBM_DISK_FREE_BYTES": "0",
        "KVMESH_KVBM_DISK_FREQUENCY": "1",
    }
    nodes.mesh.start("indexer", "indexer-0")
    east, west = await nodes.start("east", **PEERS, **disk), await nodes.start("west", **PEERS)
    names = east.names(tokens(100))
    assert await east.put(names) == 100
    await nodes.reaches("east", 'blocks{tier="2"}', 100)
    await nodes.reaches("east", 'moving_blocks{source="1",target="2"}', 0)
    await nodes.clear(east, 1)

    async def loaded() -> bool:
        result = await west.get(names, wait_s=30.0)
        assert not result.bad
        return result.tiers == [3] * 100

    await eventually(loaded)
    assert nodes.metric("east", 'moved_blocks_total{source="2",target="1"}') == 100


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_nodes_of_other_layouts_share_nothing_and_are_logged(nodes: Nodes) -> None:
    east = await nodes.start("east")
    west = await nodes.start("west", layout(weights="other"))
    sample = 'incompatible_layout_nodes{model="m"}'
    for node in ("east", "west"):
        await nodes.reaches(node, sample, 1)
    await east.put(east.names(tokens(10)))
    await nodes.shared("east", 10)
    assert not (await west.get(west.names(tokens(10)))).blocks
    same = TestWorker(nodes.bus, west.card, layout())
    nodes.workers.append(same)
    await same.attach()
    assert len((await same.get(same.names(tokens(10)))).blocks) == 10
    for node in ("east", "west"):
        await nodes.reaches(node, sample, 0)
    log = (nodes.mesh.folder / "west.log").read_text()
    (line,) = [line for line in log.splitlines() if "no blocks of m are shared with east" in line]
    assert f"here {west.shape.summary}; there {east.shape.summary}" in line


@pytest.mark.parametrize("url", ["none"], indirect=True)
async def test_a_node_of_another_layout_is_not_queried(nodes: Nodes) -> None:
    nodes.mesh.start("indexer", "indexer-0")
    other = await nodes.start("other", layout(weights="other"), **PEERS)
    alike, west = await nodes.start("alike", **PEERS), await nodes.start("west", **PEERS)
    received: list[bytes] = []

    async def record(message: Msg) -> None:
        received.append(message.data)

    assert await other.put(other.names(tokens(20))) == 20
    assert await alike.put(alike.names(tokens(10))) == 10
    await nodes.indexed(west.names(tokens(20)), 20, 10)
    await nodes.bus.client.subscribe(nodes.bus.subjects.kvbm(other.card.instance), cb=record)

    async def loaded() -> bool:
        result = await west.get(west.names(tokens(20)), wait_s=30.0)
        assert not result.bad
        return result.tiers == [3] * 10

    await eventually(loaded)
    assert not received


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_nodes_of_other_keys_share_nothing_and_are_logged(nodes: Nodes) -> None:
    keys = [bytes([n]) * KEY_BYTES for n in (1, 2)]
    east = await nodes.start("east", KVMESH_KVBM_KEY=keys[0].hex())
    west = await nodes.start("west", KVMESH_KVBM_KEY=keys[1].hex())
    for node in ("east", "west"):
        await nodes.reaches(node, "incompatible_key_nodes", 1)
    await east.put(east.names(tokens(10)))
    await nodes.shared("east", 10)
    assert not (await west.get(west.names(tokens(10)))).blocks
    log = (nodes.mesh.folder / "west.log").read_text()
    (line,) = [line for line in log.splitlines() if "no blocks are shared with east" in line]
    assert f"(fingerprint here {fingerprint(keys[1])}; there {fingerprint(keys[0])})" in line
    assert not any(key.hex() in log for key in keys)
    nodes.mesh.kill("west")
    await nodes.start("west-again", KVMESH_KVBM_KEY=keys[0].hex())
    await nodes.reaches("west-again", "incompatible_key_nodes", 0)


@pytest.mark.parametrize("url", ["folder"], indirect=True)
def test_a_store_of_no_known_kind_is_refused(nodes: Nodes) -> None:
    nodes.mesh.start("kvbm", "kv", KVMESH_KVBM_REMOTE_URL="s3://bucket")
    assert nodes.mesh.processes["kv"].wait(PATIENCE_S) == 2
    assert "is not a redis://" in (nodes.mesh.folder / "kv.log").read_text()
