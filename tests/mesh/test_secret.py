"""Secrets that many processes create at once, in any state of JetStream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from support.nats import NatsServer
from support.nats_cluster import Cluster
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.storage.shared_secret import SecretUnusable, shared_secret
from kvmesh.frontend.auth.tenant_secret import tenant_secret

PROCESSES = 6
SIZE = 32


async def connected(options: BusOptions, stack: AsyncExitStack) -> list[Bus]:
    buses = [await Bus.connect(options, f"p{number}") for number in range(PROCESSES)]
    for bus in buses:
        stack.push_async_callback(bus.close)
    return buses


@pytest_asyncio.fixture
async def buses(bus: Bus) -> AsyncIterator[list[Bus]]:
    async with AsyncExitStack() as stack:
        yield await connected(bus.options, stack)


def of_block_managers(bus: Bus) -> "asyncio.Task[bytes]":
    bucket, name = bus.subjects.kvbm_bucket, bus.subjects.identity_key
    return asyncio.create_task(shared_secret(bus, bucket, name, SIZE))


async def test_concurrent_creators_get_the_same_secret(buses: list[Bus]) -> None:
    mine = set(await asyncio.gather(*map(of_block_managers, buses)))
    tenants = set(await asyncio.gather(*(tenant_secret(bus, None) for bus in buses)))
    assert len(mine) == len(tenants) == 1
    assert mine != tenants


async def test_creation_is_retried_until_the_bucket_exists(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(shared_secret(bus, "later", "name", SIZE))
    await eventually(lambda: "retrying" in caplog.text)
    await bus.js.context.create_key_value(bucket="later")
    assert len(await waiting) == SIZE
    assert caplog.text.count("retrying") == 1
    await bus.js.context.delete_key_value("later")


async def test_creation_succeeds_once_a_silent_server_is_back(
    buses: list[Bus], nats_server: NatsServer
) -> None:
    nats_server.kill()
    await eventually(lambda: not any(bus.connected for bus in buses))
    making = [of_block_managers(bus) for bus in buses]
    await asyncio.to_thread(nats_server.start)
    assert len(set(await asyncio.gather(*making))) == 1


async def test_a_timeout_reports_its_cause(bus: Bus) -> None:
    with pytest.raises(SecretUnusable, match=r"cannot be read within 0\.3 s: .*Bucket") as error:
        await shared_secret(bus, "missing", "name", SIZE, patience_s=0.3)
    assert not error.value.configured
    assert "the secret name in bucket missing" in str(error.value)


@pytest.mark.soak
async def test_a_cluster_that_has_just_started_creates_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with AsyncExitStack() as stack:
        stack.callback(cluster.stop)
        await asyncio.to_thread(cluster.start)
        buses = await connected(BusOptions(url=cluster.url, replicas=3), stack)
        made = await asyncio.gather(*(tenant_secret(bus, None) for bus in buses))
        leader = await cluster.leader(buses[0], f"KV_{buses[0].subjects.secrets_bucket}")
        leader.kill()
        made += await asyncio.gather(*(tenant_secret(bus, None) for bus in buses))
    assert len(set(made)) == 1
