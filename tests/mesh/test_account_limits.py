"""JetStream limits of accounts and servers: served, or refused by the name of the limit."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from nats.js.api import StorageType, StreamConfig
from support import forks
from support.jwts import Operator
from support.nats import NatsServer
from support.wait import PATIENCE_S

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusUnavailable, JetStreamError, ServerUnfit
from kvmesh.bus.storage.buckets import expiring_bucket, keys_bucket, write_once_bucket
from kvmesh.bus.streams.configuration import (
    StreamLimits,
    ensure_model_store,
    ensure_streams,
    mesh_streams,
)
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.streams.reader import Start, StreamReader
from kvmesh.bus.streams.server_check import check_server

SMALL = StreamLimits(
    kv_bytes=2 << 20,
    route_bytes=1 << 20,
    seq_bytes=1 << 20,
    scaling_bytes=1 << 20,
    models_bytes=8 << 20,
)
LARGE = replace(SMALL, kv_bytes=64 << 20, seq_bytes=64 << 20)
USERS = "users: [{ user: a, password: a }]"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


def account(jetstream: str, others: str = "") -> str:
    return f"accounts {{ A {{ jetstream {jetstream}, {others} {USERS} }} }}"


def user(server: NatsServer) -> BusOptions:
    return BusOptions(url=server.url, user="a", password="a", bucket_bytes=1 << 20)


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[Bus]:
    bus = await Bus.connect(options, "test", timeout=2, once=True)
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ("max_mem: 10M", r"-seq: needs 64 MiB; raise max_mem in the account's jetstream limits"),
        ("max_file: 10M", r"-kv: needs 64 MiB; raise max_file in the account's jetstream limits"),
        ("max_streams: 2", r"maximum number of streams reached \(10027\): raise max_streams in"),
        ("disk_max_stream_bytes: 16M", r"\(10122\): raise disk_max_stream_bytes or"),
    ],
)
async def test_a_limit_of_an_account_is_named(
    server: NatsServer, limits: str, complaint: str
) -> None:
    server.settings = account(f"{{ {limits} }}")
    server.start()
    async with connected(user(server)) as bus:
        await check_server(bus)
        with pytest.raises(ServerUnfit, match=complaint):
            await ensure_streams(bus, LARGE)


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"mem_storage": 10 << 20}, r"max_mem in the account's.* \(`mem_storage` in its JWT\)"),
        ({"disk_storage": 10 << 20}, r"max_file in the account's.* \(`disk_storage` in its JWT\)"),
        ({"streams": 2}, r"raise max_streams in .* \(`streams` in its JWT\)"),
    ],
)
async def test_a_limit_in_the_jwt_of_an_account_is_named(
    server: NatsServer, tmp_path: Path, limits: dict[str, int], complaint: str
) -> None:
    operator, file = Operator(limits), tmp_path / "user.creds"
    server.settings = operator.config()
    server.start()
    operator.creds(file)
    async with connected(BusOptions(url=server.url, credentials=str(file))) as bus:
        with pytest.raises(ServerUnfit, match=complaint):
            await ensure_streams(bus, LARGE)


async def test_the_servers_own_limit_is_named_within_an_accounts(server: NatsServer) -> None:
    server.jetstream = "max_file_store: 20MB"
    server.settings = account("enabled")
    server.start()
    async with connected(user(server)) as bus:
        with pytest.raises(ServerUnfit, match="raise max_file_store in the server's configuration"):
            await ensure_streams(bus, LARGE)


@pytest.mark.parametrize("storage", [0, 1 << 50])
async def test_an_account_without_jetstream_is_told_from_such_a_server(
    server: NatsServer, tmp_path: Path, storage: int
) -> None:
    """An account with more than the server has gets none."""
    operator = Operator({"mem_storage": storage, "disk_storage": storage})
    server.settings = operator.config()
    server.start()
    operator.creds(tmp_path / "user.creds")
    options = BusOptions(url=server.url, credentials=str(tmp_path / "user.creds"))
    async with connected(options) as bus:
        with pytest.raises(ServerUnfit, match=r"account has no JetStream: add .* to its JWT"):
            await check_server(bus)


async def test_every_stream_has_a_size_where_the_account_demands_one(server: NatsServer) -> None:
    server.settings = account("{ max_file: 1G, max_mem: 1G, max_bytes_required: true }")
    server.start()
    async with connected(user(server)) as bus:
        assert await ensure_streams(bus, SMALL) == []
        await ensure_model_store(bus, SMALL)
        await keys_bucket(bus)
        expiring_bucket(bus, bus.subjects.pins_bucket, 60.0, 1 << 20)
        write_once_bucket(bus, bus.subjects.secrets_bucket)
        assert await keeper_of(bus).make_missing()
        found = await mesh_streams(bus)
        assert len(found) == 16
        assert all((info.config.max_bytes or 0) > 0 for info in found)
        assert await ensure_streams(bus, SMALL) == []


async def test_a_reader_of_a_service_waits_where_no_more_consumers_are_permitted(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.settings = account("{ max_consumers: 1 }")
    server.start()
    bus = await Bus.connect(user(server), "service")
    await ensure_streams(bus, SMALL)
    stream, subject = bus.subjects.kv_stream, bus.subjects.kv_all
    await bus.store(bus.subjects.kv("m", "w"), b"x", PATIENCE_S)
    read: list[bytes] = []
    first = StreamReader(bus, stream, subject, lambda _: None, Start())
    second = StreamReader(bus, stream, subject, lambda got: read.append(got.data), Start())
    await first.open()
    await second.open()
    limit = "maximum consumers limit reached (10026): raise max_consumers in the account's"
    assert f"cannot read {stream} yet, retrying: JetStream: {limit}" in caplog.text
    async with connected(user(server)) as command:
        of_command = StreamReader(command, stream, subject, lambda _: None, Start())
        with pytest.raises(JetStreamError, match="raise max_consumers in the account's"):
            await of_command.open()
    await first.close()
    await second.until_caught_up(PATIENCE_S)
    assert read == [b"x"]
    await second.close()
    await bus.close()


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (account("enabled", "limits { max_connections: 1 },"), "in the limits of the account"),
        (f"max_connections: 1\n{account('enabled')}", "of the server's configuration"),
    ],
)
async def test_connections_beyond_a_limit_are_refused_by_its_name(
    server: NatsServer, settings: str, limit: str
) -> None:
    server.settings = settings
    server.start()
    first = await Bus.connect(user(server), "first", PATIENCE_S)
    with pytest.raises(BusUnavailable, match=f"exceeded: raise max_connections {limit}") as refusal:
        await Bus.connect(user(server), "second", PATIENCE_S, once=True)
    assert refusal.value.denied
    await first.close()


async def test_the_streams_of_a_mesh_are_found_among_hundreds(server: NatsServer) -> None:
    server.start()
    options = BusOptions(url=server.url)
    async with connected(options) as bus:
        others = (
            StreamConfig(name=f"app-{n:03}", subjects=[f"app.{n}"], storage=StorageType.MEMORY)
            for n in range(300)
        )
        await asyncio.gather(*map(bus.js.add_stream, others))
        await ensure_streams(bus, SMALL)
        names = {info.config.name for info in await mesh_streams(bus)}
        assert {bus.subjects.kv_stream, f"KV_{bus.subjects.plan_bucket}"} <= names
    flags = ("--nats", server.url, "--streams-kv-bytes", str(4 << 20))
    done = await asyncio.to_thread(
        forks.run, ("config", "streams", "apply", *flags), os.environ, PATIENCE_S
    )
    assert f"max_bytes {2 << 20} → {4 << 20}" in done.stdout
