"""Workers that freeze, frontends that are killed, requests that end engines.

Four workers serve sixteen endless streams. Whatever happens to one process, only the culprit
request fails, every answer is the one that its prompt always has, and no request without a client
continues.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from openai import APIError, OpenAIError
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.proxy import Proxy
from support.traffic import Traffic
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORKERS = 4
RUNNING = "kvmesh_worker_running_requests"
LEASE_S = 3.0
PAUSE_S = LEASE_S + 2.0  # visible to a client
SLACK_S = 4.0  # for slow machines
DELAY_S = 2.0
FROZEN_S = 5.0
POISON = "a request that no engine survives"


@asynccontextmanager
async def serving(nats_url: str, folder: Path, **env: str) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "2", "KVMESH_STREAMS_LEASE_S": str(LEASE_S), **env}
    mesh = Mesh(nats_url, folder, env)
    try:
        mesh.start_all(WORKERS)
        await mesh.ready()
        await eventually(lambda: mesh.live_workers() == WORKERS)
        yield mesh
    finally:
        mesh.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    async with serving(nats_server.url, tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


async def test_a_frozen_worker_is_harmless_when_it_thaws(mesh: Mesh) -> None:
    async with Traffic(mesh.url) as traffic:
        await traffic.wait_for_outputs()
        process = mesh.processes["worker-0"]
        process.send_signal(signal.SIGSTOP)
        try:
            await eventually(lambda: mesh.live_workers() == WORKERS - 1, what="its lease has ended")
            await traffic.wait_for_outputs()
        finally:
            process.send_signal(signal.SIGCONT)
        await eventually(lambda: mesh.live_workers() == WORKERS, what="it is back")
        await eventually(lambda: "other processes considered this one dead" in mesh.logs())
        await traffic.wait_for_outputs()
    traffic.check(PAUSE_S + SLACK_S)
    await eventually(lambda: not mesh.metric(RUNNING), what="no request runs without a client")


async def test_workers_frozen_together_cost_no_request(mesh: Mesh) -> None:
    async with Traffic(mesh.url) as traffic:
        await traffic.wait_for_outputs()
        frozen = [mesh.processes[f"worker-{number}"] for number in range(WORKERS - 1)]
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        try:
            await traffic.wait_for_outputs()
        finally:
            for process in frozen:
                process.send_signal(signal.SIGCONT)
        await traffic.wait_for_outputs()
    traffic.check(PAUSE_S + SLACK_S)


async def test_workers_killed_one_after_the_other_cost_no_request(mesh: Mesh) -> None:
    async with Traffic(mesh.url) as traffic:
        await traffic.wait_for_outputs()
        for number in range(WORKERS - 1):
            mesh.kill(f"worker-{number}")
            await asyncio.sleep(1)  # the last worker's requests have only just migrated
        await traffic.wait_for_outputs()
    for number in range(WORKERS - 1):
        mesh.restart(f"worker-{number}")
    await eventually(lambda: mesh.live_workers() == WORKERS)
    assert traffic.failed == []


async def test_the_requests_of_a_killed_frontend_are_aborted(mesh: Mesh) -> None:
    traffic = Traffic(mesh.url)
    pending = [
        asyncio.create_task(traffic.stream(f"Number {number}. " * 30, tokens=5000))
        for number in range(12)
    ]
    await eventually(lambda: mesh.metric(RUNNING) == len(pending))
    mesh.kill("frontend-0")
    assert len(await asyncio.gather(*pending, return_exceptions=True)) == len(pending)
    mesh.restart("frontend-0")
    await mesh.ready()
    await eventually(lambda: "is gone: aborting its requests" in mesh.logs())
    await eventually(lambda: mesh.live_workers() == WORKERS and not mesh.metric(RUNNING))
    assert mesh.metric("kvmesh_worker_output_tokens_total") < len(pending) * 5000
    await traffic.stop()


async def test_a_worker_with_delayed_packets_costs_no_request(
    nats_server: NatsServer, mesh: Mesh
) -> None:
    mesh.kill("worker-0")
    proxy = Proxy(nats_server.port)
    proxy.start()
    try:
        mesh.start("worker", "worker-0", KVMESH_NATS_URL=proxy.url)
        await eventually(lambda: mesh.live_workers() == WORKERS, what="it is back")
        async with Traffic(mesh.url) as traffic:
            await traffic.wait_for_outputs()
            proxy.delay_s = DELAY_S
            await traffic.run_for(2 * FROZEN_S)
            proxy.delay_s = 0.0
            await traffic.wait_for_outputs()
            await eventually(lambda: mesh.live_workers() == WORKERS, what="it is back")
        traffic.check(PAUSE_S + SLACK_S)
        await eventually(lambda: not mesh.metric(RUNNING), what="no request runs without a client")
        mesh.kill("worker-0")
    finally:
        proxy.stop()
    mesh.start("worker", "worker-0")
    await eventually(lambda: mesh.live_workers() == WORKERS)


async def test_a_frozen_frontend_does_not_affect_the_clients_of_another(mesh: Mesh) -> None:
    port = free_port()
    mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(port))
    other = Traffic(f"http://127.0.0.1:{port}")
    await eventually(lambda: serves(other), what="another frontend serves")
    async with Traffic(mesh.url) as traffic, other:
        await other.wait_for_outputs()
        process = mesh.processes["frontend-1"]
        process.send_signal(signal.SIGSTOP)
        try:
            await traffic.run_for(FROZEN_S)
        finally:
            process.send_signal(signal.SIGCONT)
        await other.wait_for_outputs()
        await traffic.wait_for_outputs()
    traffic.check(SLACK_S)
    assert other.failed == []
    await eventually(lambda: not mesh.metric(RUNNING), what="no request runs without a client")
    mesh.kill("frontend-1", signal.SIGTERM)


async def serves(traffic: Traffic) -> bool:
    try:
        return bool(await traffic.stream("Are you there?"))
    except OpenAIError:
        return False


async def test_a_frozen_bus_costs_a_pause(nats_server: NatsServer, mesh: Mesh) -> None:
    async with Traffic(mesh.url) as traffic:
        await traffic.wait_for_outputs()
        nats_server.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_S)  # nothing may happen meanwhile
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
        await traffic.wait_for_outputs()
        await traffic.wait_for_outputs()
    traffic.check(FROZEN_S + LEASE_S + SLACK_S)
    await eventually(lambda: mesh.live_workers() == WORKERS)
    await eventually(lambda: not mesh.metric(RUNNING), what="no request runs without a client")


@pytest.mark.parametrize("effect", ["crash", "hang", "block"])
async def test_a_request_that_crashes_engines_costs_two_and_fails_alone(
    nats_server: NatsServer, tmp_path: Path, effect: str
) -> None:
    env = {"KVMESH_MOCK_POISON": POISON, "KVMESH_MOCK_POISON_EFFECT": effect}
    env |= dict.fromkeys(("KVMESH_PROCESS_HANG_TIMEOUT_S", "KVMESH_WORKER_HANG_TIMEOUT_S"), "3")
    async with serving(nats_server.url, tmp_path, **env) as mesh:
        async with Traffic(mesh.url) as traffic:
            await traffic.wait_for_outputs()
            with pytest.raises(APIError, match="stopped responding"):
                await traffic.stream(f"This is {POISON}. " * 10)
            await eventually(lambda: len(ended(mesh)) == 2, what="two workers have ended")
            await traffic.wait_for_outputs()
        assert traffic.failed == []
        assert set(ended(mesh)) == ({-signal.SIGABRT} if effect == "block" else {1})
        assert mesh.logs().count(f"injected {effect} by request") == 2


def ended(mesh: Mesh) -> list[int]:
    """The exit status of each process that has ended."""
    codes = [process.poll() for process in mesh.processes.values()]
    return [code for code in codes if code is not None]
