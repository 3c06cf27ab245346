"""JetStream loses its files, some streams, or goes back to an older copy, while a mesh runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually
from support.wholeness import Tenants

from kvmesh.bus.client import Bus

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        assert await asyncio.to_thread(tenants.serves_alike)
        yield tenants


async def test_deleted_streams_are_made_again(tenants: Tenants) -> None:
    for name in sorted(tenants.before):
        await tenants.bus.js.context.delete_stream(name)
        await asyncio.to_thread(tenants.cached, "frontend-0", f"{name} is gone. " * 20)
    print("whole after", await tenants.whole())


async def test_a_lost_store_is_filled_again(tenants: Tenants, nats_server: NatsServer) -> None:
    await asyncio.to_thread(nats_server.wipe)
    await eventually(lambda: tenants.bus.connected)
    print("whole after", await tenants.whole())
