"""Each loss of JetStream's contents, while each role restarts; `make soak` runs it."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually
from support.wholeness import Tenants

from kvmesh.bus.client import Bus

pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]
ROLES = ("router-0", "indexer-0", "worker-0", "frontend-1")
Loss = Callable[[Tenants, NatsServer, Path], Awaitable[None]]


async def deleted(tenants: Tenants, _: NatsServer, __: Path) -> None:
    for name in tenants.before:
        await tenants.bus.js.context.delete_stream(name)


async def emptied(tenants: Tenants, _: NatsServer, __: Path) -> None:
    for name, config in tenants.before.items():
        if not config.deny_purge:
            await tenants.bus.js.purge_stream(name)


async def wiped(_: Tenants, nats_server: NatsServer, __: Path) -> None:
    await asyncio.to_thread(nats_server.wipe)


async def older(_: Tenants, nats_server: NatsServer, folder: Path) -> None:
    if not (folder / "copy").exists():
        await asyncio.to_thread(nats_server.back_up, folder / "copy")
    await asyncio.to_thread(nats_server.restore, folder / "copy")
    await asyncio.to_thread(nats_server.start)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Tenants]:
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("tenants"))
    async with AsyncExitStack() as stack:
        stack.callback(mesh.stop)
        bus = await Bus.connect(mesh.options, "test")
        stack.push_async_callback(bus.close)
        tenants = Tenants(mesh, bus)
        await tenants.start()
        yield tenants


@pytest.mark.parametrize(
    ("loss", "role", "first"),
    list(itertools.product((deleted, emptied, wiped, older), ROLES, (False, True))),
)
async def test_a_mesh_is_whole_after_a_loss_and_a_restart(
    tenants: Tenants, nats_server: NatsServer, tmp_path: Path, loss: Loss, role: str, first: bool
) -> None:
    if first:  # the process ends before the loss, and starts after it
        tenants.mesh.kill(role, signal.SIGKILL)
    await loss(tenants, nats_server, tmp_path)
    await eventually(lambda: tenants.bus.connected)
    if not first:
        tenants.mesh.kill(role, signal.SIGKILL)
    if role in tenants.started:
        tenants.start_frontend(role)
    else:
        tenants.mesh.restart(role)
    await tenants.ready()
    await tenants.whole()
    # one stream at a time, each under a request
    for name in sorted(tenants.before) if loss is deleted and role == "router-0" else ():
        await tenants.bus.js.context.delete_stream(name)
        await asyncio.to_thread(tenants.cached, "frontend-0", f"{name} is gone. " * 20)
        await tenants.whole()
