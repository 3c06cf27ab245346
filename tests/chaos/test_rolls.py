"""Servers of a NATS cluster stop in turn under load: clients notice a pause at most.

Processes change servers, which is no death: nobody deletes a lease, and no answer is lost or wrong.
The long rolls print what they have done. `NATS_SERVER_OLD` names the binary of an older release of
nats-server, from which one of them upgrades.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh, is_healthy, stream_env
from support.nats import SERVER, free_port
from support.nats_cluster import Cluster, Member, is_settled
from support.traffic import Traffic, distinct_prompts
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError
from kvmesh.bus.streams.configuration import StreamLimits, mesh_streams

STREAMS, SHORT = 4, 4  # clients of each frontend: long answers, and answers of a few tokens
STREAM_TOKENS, SHORT_TOKENS = 100, 4
PAUSE_S = 3.0
OUTAGE_S = 30.0
LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=16 << 20)
OLD = os.environ.get("NATS_SERVER_OLD", "")
NO_OLD = pytest.mark.skipif(not OLD, reason="NATS_SERVER_OLD names no binary")
DEATHS = ("is gone", "lease had ended", "lease lapsed")


@dataclass
class Stage:
    cluster: Cluster
    mesh: Mesh
    bus: Bus
    urls: list[str]
    traffic: list[Traffic] = field(default_factory=list)

    async def settled(self) -> None:
        """Wait until every server has every replica, so that the next one may stop."""
        await eventually(self._is_settled, what="all replicas are current")

    async def _is_settled(self) -> bool:
        try:
            names = [info.config.name or "" for info in await mesh_streams(self.bus)]
        except BusError as error:
            raise AssertionError(f"not yet: {error!r}") from error
        return all([await is_settled(self.cluster, self.bus, name) for name in names])

    async def progress(self) -> None:
        for each in self.traffic:
            await each.wait_for_outputs(2)

    async def replaced(self, member: Member, stop: Callable[[Member], None]) -> None:
        """Stop a server under load, and start it again."""
        await asyncio.to_thread(stop, member)
        await self.progress()
        await asyncio.to_thread(member.start)
        await self.settled()
        await self.progress()

    def deaths(self) -> list[str]:
        return [line for line in self.mesh.logs().splitlines() if any(d in line for d in DEATHS)]

    def report(self, what: str) -> None:
        failed = [reason for each in self.traffic for reason in each.failed]
        wrong = [reason for reason in failed if reason.startswith("AssertionError")]
        print(
            f"{what}: {sum(each.completed for each in self.traffic)} answers, {len(failed)} failed,"
            f" of these {len(wrong)} wrong; longest pause"
            f" {max(each.longest_pause for each in self.traffic):.2f} s;"
            f" {len(self.deaths())} taken for dead"
        )

    def check(self) -> None:
        assert [reason for each in self.traffic for reason in each.failed] == []
        assert self.deaths() == []


async def staged(stack: AsyncExitStack, folder: Path, binary: Path, frontends: int) -> Stage:
    """A mesh on a new cluster, with running clients."""
    cluster = Cluster(folder)
    stack.callback(cluster.stop)
    for member in cluster.members:
        member.binary = binary
    await asyncio.to_thread(cluster.start)
    env = {
        "KVMESH_NATS_REPLICAS": "3",
        "KVMESH_MOCK_SPEEDUP": "1",  # the clients cost little
        "KVMESH_FRONTEND_RESPONSES_BYTES": str(64 << 20),
    }
    mesh = Mesh(cluster.url, folder, env | stream_env(LIMITS))
    stack.callback(mesh.stop)
    mesh.start_all()
    urls = [mesh.url]
    for number in range(1, frontends):
        port = free_port()
        mesh.start("frontend", f"frontend-{number}", KVMESH_FRONTEND_PORT=str(port))
        urls.append(f"http://127.0.0.1:{port}")
    await mesh.ready()
    await eventually(lambda: all(map(is_healthy, urls)), what="all frontends are ready")
    await eventually(lambda: mesh.live_workers() == 2)
    bus = await Bus.connect(mesh.options, "test")
    stack.push_async_callback(bus.close)
    stage = Stage(cluster, mesh, bus, urls)
    await stage.settled()
    for url in urls:
        for clients, tokens in ((STREAMS, STREAM_TOKENS), (SHORT, SHORT_TOKENS)):
            prompts = distinct_prompts(2, clients)
            traffic = Traffic(url, prompts, clients, tokens)
            await stack.enter_async_context(traffic)
            stage.traffic.append(traffic)
    return stage


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_a_roll_of_the_servers_is_no_death(stack: AsyncExitStack, tmp_path: Path) -> None:
    stage = await staged(stack, tmp_path, SERVER, frontends=1)
    for member, stop in zip(
        stage.cluster.members, (Member.leave, Member.kill, Member.stop), strict=True
    ):
        await stage.replaced(member, stop)
    stage.report("a roll")
    stage.check()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stop", [Member.leave, Member.kill])
@pytest.mark.parametrize("binary", [SERVER, pytest.param(Path(OLD), marks=NO_OLD)])
async def test_rolls_and_upgrades_are_no_deaths(
    stack: AsyncExitStack, tmp_path: Path, stop: Callable[[Member], None], binary: Path
) -> None:
    stage = await staged(stack, tmp_path, binary, frontends=2)
    for _ in range(2):
        for member in stage.cluster.members:
            member.binary = SERVER
            await stage.replaced(member, stop)
    stage.report(f"{stop.__name__}, from {binary}")
    stage.check()
    assert max(each.longest_pause for each in stage.traffic) <= PAUSE_S


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_without_quorum_everything_waits(stack: AsyncExitStack, tmp_path: Path) -> None:
    stage = await staged(stack, tmp_path, SERVER, frontends=2)
    for _ in range(2):
        first, second, _ = stage.cluster.members
        first.kill()
        await asyncio.sleep(1.0)
        second.kill()
        await asyncio.sleep(OUTAGE_S)
        for member in (first, second):
            await asyncio.to_thread(member.start)
        await stage.settled()
        await stage.progress()
    stage.report(f"without quorum for {OUTAGE_S:g} s")
    stage.check()
