"""Credentials and permissions that change under a running mesh and its streams."""

import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.jwts import Operator
from support.mesh import Mesh
from support.nats import NatsServer
from support.secured import SecuredServer
from support.traffic import Traffic
from support.wait import eventually

from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.discovery.leases import REFUSED_STATE, STATE
from kvmesh.bus.messages import Role

LIVES_S = 12.0  # of a user; renewed far more often
ROLES = ("frontend", "router", "indexer", "worker", "kvbm", "planner")
FAST = {"KVMESH_MOCK_SPEEDUP": "4"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture(params=[(), ("--jwt",)], ids=["nkeys", "JWTs"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SecuredServer]:
    server = SecuredServer(tmp_path, "--workers", "worker-0,worker-1", *request.param)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def running(mesh: Mesh) -> AsyncIterator[Traffic]:
    """A mesh that is ready, and its clients; no process ends, no answer is wrong."""
    try:
        await mesh.ready()
        started = {name: process.pid for name, process in mesh.processes.items()}
        async with Traffic(mesh.url, clients=4) as traffic:
            await traffic.wait_for_outputs(4)
            yield traffic
            await traffic.wait_for_outputs(8)
        traffic.check(pause=30.0)
        assert started.items() <= {n: p.pid for n, p in mesh.processes.items()}.items()
        assert all(process.poll() is None for process in mesh.processes.values())
    finally:
        mesh.stop()


def logins(mesh: Mesh) -> float:
    """Of the frontend, after its first."""
    return mesh.metrics()["kvmesh_bus_reconnects_total"]


async def test_a_user_that_expires_under_streams_is_renewed_in_place(
    server: NatsServer, tmp_path: Path
) -> None:
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    user = operator.creds(file, time.time() + LIVES_S)
    server.start()
    stopped = threading.Event()

    def renew() -> None:
        while not stopped.wait(1):
            operator.creds(file, time.time() + LIVES_S, user)

    renewing = threading.Thread(target=renew)  # a start of processes blocks the event loop
    renewing.start()
    mesh = Mesh(server.url, tmp_path, {**FAST, "KVMESH_NATS_CREDENTIALS": str(file)})
    mesh.start_all()
    try:
        async with running(mesh):
            before = logins(mesh)
            await eventually(lambda: logins(mesh) >= before + 2, what="users expire")
    finally:
        stopped.set()
        renewing.join()
    assert "user authentication expired" in mesh.logs()


async def test_a_user_that_is_replaced_under_streams(server: NatsServer, tmp_path: Path) -> None:
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    user = operator.creds(file)
    server.start()
    mesh = Mesh(server.url, tmp_path, {**FAST, "KVMESH_NATS_CREDENTIALS": str(file)})
    mesh.start_all()
    async with running(mesh) as traffic:
        for _ in range(2):
            before = logins(mesh)
            former, user = user, operator.creds(file)  # with another key
            operator.revoked[former.public] = int(time.time()) + 1
            server.settings = operator.config()
            server.reload()
            await eventually(lambda: logins(mesh) > before, what="the frontend logs in again")  # noqa: B023
            await traffic.wait_for_outputs(4)


def secured_mesh(server: SecuredServer, folder: Path, workers: int) -> Mesh:
    mesh = Mesh(server.url, folder, FAST, namespace="kvmesh")
    node = {"KVMESH_KVBM_DIRECTORY": str(folder / "node")}
    mesh.start("indexer", "indexer-0", **server.env("indexer"))
    mesh.start("router", "router-0", **server.env("router"))
    for number in range(workers):
        mesh.start("worker", f"worker-{number}", **server.env(f"worker.worker-{number}"))
    mesh.start("kvbm", "kvbm-0", **server.env("kvbm.kvbm-0"), **node)
    mesh.start("planner", "planner-0", **server.env("planner"))
    mesh.start("frontend", "frontend-0", **server.env("frontend"))
    return mesh


async def refused_roles(server: SecuredServer) -> dict[Role, bool]:
    """Each role that has a card, and whether that says that a subject is refused."""
    async with server.connected("observer") as bus:
        cards = await read_cards(bus, *map(Role, ROLES))
    return {card.role: card.labels.get(STATE) == REFUSED_STATE for card in cards}


async def all_joined(server: SecuredServer) -> bool:
    found = await refused_roles(server)
    return set(found) == set(map(Role, ROLES)) and not any(found.values())


async def test_secure_runs_again_on_a_running_mesh(secured: SecuredServer, tmp_path: Path) -> None:
    """Nothing that serves is disturbed, and what it adds can join."""
    mesh = secured_mesh(secured, tmp_path, workers=1)
    async with running(mesh) as traffic:
        await eventually(lambda: all_joined(secured), what="every role joins")
        before = logins(mesh)
        secured._arguments = (*secured._arguments, "--kvbms", "kvbm-0,kvbm-1")
        for _ in range(2):
            secured.reload()  # which runs the command
            await traffic.wait_for_outputs(4)
        assert logins(mesh) == before
        mesh.start("worker", "worker-1", **secured.env("worker.worker-1"))
        await eventually(lambda: "serving" in mesh.logs().rpartition("--- worker-1")[2])
        assert "kvbm.kvbm-1" in secured.users
        assert await all_joined(secured)


async def test_permissions_that_were_missing_are_loaded_by_every_role(tmp_path: Path) -> None:
    """Those of an earlier release may lack subjects of this one."""
    secured = SecuredServer(tmp_path)
    secured.start()
    mesh = secured_mesh(secured, tmp_path, workers=1)
    try:
        await mesh.ready()
        await eventually(lambda: all_joined(secured), what="every role joins")
        started = {name: process.pid for name, process in mesh.processes.items()}
        whole = secured.config()
        own = r'"kvm\.kvmesh\.(ask|ping|kvbm)\.[^"]*"'
        less = re.sub(own, '"kvm.kvmesh.none"', whole)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secured, "config", lambda: less)
            secured.reload()

        async def all_refused() -> bool:
            found = await refused_roles(secured)
            assert set(found) == set(map(Role, ROLES))
            return all(found.values())

        await eventually(all_refused, what="every role says that a subject is refused")
        secured.reload()  # `kvmesh secure` runs again
        await eventually(lambda: all_joined(secured), what="every role heals")
        async with Traffic(mesh.url, clients=2) as traffic:
            await traffic.wait_for_outputs(4)
        assert traffic.failed == []
        assert started == {name: process.pid for name, process in mesh.processes.items()}
    finally:
        mesh.stop()
        secured.stop()
