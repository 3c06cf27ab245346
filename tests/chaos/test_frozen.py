"""Frozen and delayed processes: clients notice a pause at most.

Two routers, two indexers and four workers serve sixteen endless streams. One process is stopped
or delayed, and thaws later. No request fails, every answer is the one that its prompt always has,
and no stream is silent for longer than it takes to give the process up.
"""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.proxy import Proxy
from support.traffic import Traffic, distinct_prompts
from support.wait import eventually

PAUSE_S = 2.0  # visible to a client
SLACK_S = 4.0  # for slow machines; a frozen router used to cost a minute
DELAY_S = 2.0
FROZEN_S = 4.0  # long enough to reveal lost work


@dataclass
class Stage:
    """The mesh, and its answer to each of the clients' prompts while it is undisturbed."""

    mesh: Mesh
    proxies: dict[str, Proxy]
    answers: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def stage(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    env = {"KVMESH_MOCK_SPEEDUP": "2", "KVMESH_STREAMS_LEASE_S": "30"}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("frozen"), env)
    proxies = {name: Proxy(nats_server.port) for name in ("router-0", "indexer-0")}
    try:
        for proxy in proxies.values():
            proxy.start()
        for role, count in {"indexer": 2, "router": 2, "worker": 4}.items():
            for name in (f"{role}-{number}" for number in range(count)):
                own = {"KVMESH_NATS_URL": proxies[name].url} if name in proxies else {}
                mesh.start(role, name, **own)
        mesh.start("frontend", "frontend-0")
        asyncio.run(mesh.ready())
        yield Stage(mesh, proxies)
    finally:
        mesh.stop()
        for proxy in proxies.values():
            proxy.stop()


def traffic_of(stage: Stage) -> Traffic:
    return Traffic(stage.mesh.url, distinct_prompts(2), tokens=40, answers=stage.answers)


@pytest.mark.parametrize("name", ["router-0", "indexer-0"])
async def test_a_frozen_process_is_excluded_and_harmless_when_it_thaws(
    stage: Stage, name: str
) -> None:
    async with traffic_of(stage) as traffic:
        await traffic.wait_for_outputs()
        process = stage.mesh.processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            await traffic.run_for(FROZEN_S)
        finally:
            process.send_signal(signal.SIGCONT)
        await traffic.wait_for_outputs()
    traffic.check(PAUSE_S + SLACK_S)
    await _check_no_requests(stage)


@pytest.mark.parametrize("name", ["router-0", "indexer-0"])
async def test_a_process_with_delayed_packets_is_excluded(stage: Stage, name: str) -> None:
    async with traffic_of(stage) as traffic:
        await traffic.wait_for_outputs()
        stage.proxies[name].delay_s = DELAY_S
        try:
            await traffic.run_for(FROZEN_S)
        finally:
            stage.proxies[name].delay_s = 0.0
        await traffic.wait_for_outputs()
    traffic.check(PAUSE_S + SLACK_S)
    await _check_no_requests(stage)


async def test_a_thawed_frontend_completes_its_answers(stage: Stage) -> None:
    async with traffic_of(stage) as traffic:
        await traffic.wait_for_outputs()
        process = stage.mesh.processes["frontend-0"]
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)  # nothing may happen meanwhile
            process.send_signal(signal.SIGCONT)
            await traffic.wait_for_outputs()
    assert traffic.failed == []
    await _check_no_requests(stage)


async def _check_no_requests(stage: Stage) -> None:
    """Assert that no process runs a request without a client."""
    await eventually(lambda: stage.mesh.metric("kvmesh_worker_running_requests") == 0)
