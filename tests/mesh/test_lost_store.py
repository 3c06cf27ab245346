"""JetStream loses its files, some streams, or goes back to an older copy, while a mesh runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually
from support.wholeness import Tenants, key_entry

from kvmesh.bus.client import Bus
from kvmesh.bus.storage.buckets import keys_bucket

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


async def test_streams_that_are_deleted_one_by_one_are_made_again_as_they_were(
    tenants: Tenants,
) -> None:
    for name in sorted(tenants.before):
        await tenants.bus.js.context.delete_stream(name)
        await asyncio.to_thread(tenants.cached, "frontend-1", f"{name} is gone. " * 20)
    await tenants.whole()


async def test_emptied_streams_are_filled_again(tenants: Tenants) -> None:
    for name in sorted(tenants.before):
        if not tenants.before[name].deny_purge:
            await tenants.bus.js.purge_stream(name)
    await asyncio.to_thread(tenants.cached, "frontend-1", "Everything is purged. " * 20)
    await tenants.whole()


async def test_a_lost_store_is_filled_again_and_what_is_gone_is_named(
    tenants: Tenants, nats_server: NatsServer
) -> None:
    await (await keys_bucket(tenants.bus)).put("bob", key_entry("bob"))
    await eventually(lambda: tenants.status_of("bob") == 200)
    shared = "A prompt from before the loss. " * 20
    await asyncio.to_thread(tenants.cached, "frontend-0", shared)
    await asyncio.to_thread(nats_server.wipe)
    await eventually(lambda: tenants.bus.connected)
    await tenants.whole()
    assert tenants.cached("frontend-1", shared) > 0  # the tenant's secret is the same
    assert await tenants.warnings("bob are gone")
    assert await tenants.warnings("stored responses are gone")
    await eventually(lambda: tenants.status_of("bob") == 401, what="each frontend knows")


async def test_a_frontend_that_starts_after_the_loss_shares_the_secret(
    tenants: Tenants, nats_server: NatsServer
) -> None:
    shared = "A prompt that the other frontend has cached. " * 20
    await asyncio.to_thread(tenants.cached, "frontend-0", shared)
    tenants.mesh.kill("frontend-1")
    nats_server.kill()
    tenants.start_frontend("frontend-1")
    await eventually(lambda: "no NATS server" in tenants.log("frontend-1"))
    await asyncio.to_thread(nats_server.wipe)
    await tenants.ready()
    assert tenants.cached("frontend-1", shared) > 0
    await tenants.whole()


async def test_an_older_copy_is_brought_up_to_date(
    tenants: Tenants, nats_server: NatsServer, tmp_path: Path
) -> None:
    keys = await keys_bucket(tenants.bus)
    await keys.put("carol", key_entry("carol"))
    await eventually(lambda: tenants.status_of("carol") == 200)
    await asyncio.to_thread(nats_server.back_up, tmp_path / "copy")
    await eventually(lambda: tenants.bus.connected)
    await keys.delete("carol")
    await keys.put("dave", key_entry("dave"))
    await eventually(lambda: tenants.status_of("dave") == 200)
    assert tenants.status_of("carol") == 401
    await tenants.whole()
    await asyncio.to_thread(nats_server.restore, tmp_path / "copy")
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: tenants.bus.connected)
    await tenants.whole()
    assert await tenants.warnings("dave are gone; carol are valid again")
    assert tenants.status_of("carol") == 200
