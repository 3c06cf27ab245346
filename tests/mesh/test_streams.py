"""Streams are created once and changed by a command; too small a server is reported."""

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from nats.js.api import DiscardPolicy, StorageType
from support import forks
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusUnavailable, ServerUnfit
from kvmesh.bus.streams.configuration import StreamLimits, differences, ensure_streams, mesh_streams
from kvmesh.bus.streams.server_check import check_server

PAGE = Path(__file__).parents[2] / "docs" / "jetstream.md"
SMALL = StreamLimits(kv_bytes=2 << 20, kv_age_s=60.0, route_bytes=1 << 20, seq_bytes=1 << 20)


async def kvmesh(*arguments: str) -> tuple[int, str]:
    """Run a command; returns its status and output."""
    done = await asyncio.to_thread(forks.run, arguments, os.environ, PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def at(options: BusOptions) -> tuple[str, ...]:
    return ("--nats", options.url, "--nats-namespace", options.namespace)


async def kv_bytes(bus: Bus) -> int:
    return (await bus.js.stream_info(bus.subjects.kv_stream)).config.max_bytes or 0


async def test_streams_are_stored_as_documented(bus: Bus) -> None:
    documented: dict[str, StorageType] = {}
    for line in PAGE.read_text().splitlines():
        what, _, rest = line.removeprefix("| ").partition(" | ")
        for where, storage in (("in memory", StorageType.MEMORY), ("on disk", StorageType.FILE)):
            if rest.startswith(where):
                documented |= dict.fromkeys(re.findall(r"`(\w+)`", what), storage)
    found = await mesh_streams(bus)
    kinds = {(info.config.name or "").rpartition("-")[2]: info.config for info in found}
    buckets = {"instances", "router", "kvbm", "plan", "index", "models"}
    assert {"kv", "route", "seq", "scaling", *buckets} <= kinds.keys()
    for kind, config in kinds.items():
        assert config.storage == documented[kind], kind
        events = kind in ("kv", "route", "seq", "scaling")
        assert config.discard == (DiscardPolicy.OLD if events else DiscardPolicy.NEW), kind
        assert (config.duplicate_window == 1.0) is (events or kind == "instances"), kind


async def test_an_account_that_permits_few_consumers_has_all_streams(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.settings = (
        "accounts { A { jetstream { max_mem: 1G, max_file: 20G, max_consumers: 500 },"
        " users: [{ user: a, password: a }] } }"
    )
    server.start()
    bus = await Bus.connect(BusOptions(url=server.url, user="a", password="a"), "test")
    await ensure_streams(bus, StreamLimits())
    info = await bus.js.stream_info(f"KV_{bus.subjects.instances_bucket}")
    assert info.config.max_consumers == -1
    await bus.close()
    server.stop()


async def test_no_start_of_a_process_changes_streams(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> None:
    await bus.store(bus.subjects.kv("m", "w"), b"x" * 500_000, PATIENCE_S)
    before = (await bus.js.stream_info(bus.subjects.kv_stream)).config
    mesh = Mesh(
        nats_server.url,
        tmp_path,
        {"KVMESH_STREAMS_KV_BYTES": "1048576", "KVMESH_NATS_REPLICAS": "3"},
        bus.options.namespace,
    )
    mesh.start("indexer", "indexer-0")
    await eventually(lambda: "ready" in mesh.logs())
    mesh.stop()
    assert (await bus.js.stream_info(bus.subjects.kv_stream)).config == before
    wanted = f"has max_bytes {limits.kv_bytes}, streams.kv_bytes is 1048576"
    assert f"{bus.subjects.kv_stream} {wanted}; `kvmesh config streams apply`" in mesh.logs()
    assert f"{bus.subjects.seq_stream} has num_replicas 1, nats.replicas is 3" in mesh.logs()


async def test_lease_repair_changes_no_streams(bus: Bus, limits: StreamLimits) -> None:
    found = await ensure_streams(bus, SMALL)
    assert await kv_bytes(bus) == limits.kv_bytes
    assert ("max_bytes", SMALL.kv_bytes) in [(d.limit, d.wanted) for d in found]
    assert await ensure_streams(bus, limits) == []


async def test_the_command_changes_limits_and_nothing_else(bus: Bus, limits: StreamLimits) -> None:
    before = (await bus.js.stream_info(bus.subjects.kv_stream)).config
    flags = (*at(bus.options), "--streams-kv-bytes", "2097152", "--streams-kv-age-s", "0.5")
    _, listed = await kvmesh("config", "streams", "list", *flags)
    assert f"{bus.subjects.kv_stream} has max_bytes {limits.kv_bytes}" in listed
    assert await kv_bytes(bus) == limits.kv_bytes
    status, applied = await kvmesh("config", "streams", "apply", *flags)
    assert status == 0
    assert f"{bus.subjects.kv_stream}: max_bytes {limits.kv_bytes} → 2097152" in applied
    after = (await bus.js.stream_info(bus.subjects.kv_stream)).config
    assert after == before.evolve(max_bytes=2097152, max_age=0.5, duplicate_window=0.5)
    assert await kvmesh("config", "streams", "apply", *flags) == (0, "nothing to change\n")


async def test_a_stream_that_cannot_be_changed_holds_up_no_other(
    bus: Bus, limits: StreamLimits
) -> None:
    flags = ("--streams-kv-bytes", str(100 << 40), "--streams-route-bytes", str(3 << 20))
    status, shown = await kvmesh("config", "streams", "apply", *at(bus.options), *flags)
    assert status == 1
    assert f"{bus.subjects.route_stream}: max_bytes {limits.route_bytes} → {3 << 20}\n" in shown
    assert f"kvmesh config streams: NATS cannot store {bus.subjects.kv_stream}: needs " in shown
    assert f"{bus.subjects.kv_stream}: max_bytes" not in shown
    route = (await bus.js.stream_info(bus.subjects.route_stream)).config
    assert route.max_bytes == 3 << 20
    assert await kv_bytes(bus) == limits.kv_bytes


async def test_buckets_of_other_meshes_are_not_changed(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    other = await Bus.connect(replace(options, namespace=f"{options.namespace}-b"), "other")
    await ensure_streams(other, limits)
    thrice = await Bus.connect(replace(options, replicas=3), "thrice")
    found = differences(thrice, limits, await mesh_streams(thrice))
    for each in (other, thrice):
        await each.close()
    assert {d.stream for d in found if d.limit == "num_replicas"} == {
        *(bus.subjects.kv_stream, bus.subjects.route_stream, bus.subjects.seq_stream),
        f"KV_{bus.subjects.instances_bucket}",
        f"KV_{bus.subjects.router_bucket}",
        f"KV_{bus.subjects.kvbm_bucket}",
        bus.subjects.scaling_stream,
        f"KV_{bus.subjects.plan_bucket}",
        f"KV_{bus.subjects.weights_bucket}",
        f"OBJ_{bus.subjects.index_bucket}",
        f"OBJ_{bus.subjects.model_bucket}",
    }


async def test_buckets_are_read_from_their_leader(bus: Bus) -> None:
    infos = await mesh_streams(bus)
    buckets = [info.config for info in infos if (info.config.name or "").startswith("KV_")]
    assert len(buckets) == 5
    assert not any(config.allow_direct for config in buckets)


@pytest.fixture
def configured(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server with unusual settings."""
    server = NatsServer(tmp_path)
    for name, value in request.param.items():
        setattr(server, name, value)
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("configured", "complaint"),
    [
        ({"jetstream": None}, "runs without JetStream: add jetstream {"),
        ({"max_payload": "16KB"}, "set max_payload"),
        ({"jetstream": "max_file_store: 100MB"}, "raise max_file_store"),
        ({"jetstream": "max_memory_store: 10MB"}, "raise max_memory_store"),
    ],
    indirect=["configured"],
)
async def test_an_unsuitable_server_is_one_line_that_names_the_setting(
    configured: NatsServer, complaint: str
) -> None:
    status, output = await kvmesh("worker", "--nats", configured.url)
    assert status == 1
    assert complaint in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("configured", [{}], indirect=True)
async def test_more_replicas_than_servers_are_an_error_that_names_the_setting(
    configured: NatsServer,
) -> None:
    bus = await Bus.connect(BusOptions(url=configured.url, replicas=3), "test")
    await check_server(bus)
    with pytest.raises(ServerUnfit, match=r"nats\.replicas"):
        await ensure_streams(bus, SMALL)
    await bus.close()


AUTHORIZED = {"settings": "authorization { user: mesh, password: right }"}


@pytest.mark.parametrize("configured", [AUTHORIZED], indirect=True)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (BusOptions(user="mesh", password="wrong"), r"rejects nats\.user and nats\.password"),
        (BusOptions(token="wrong"), r"rejects nats\.token"),
        (BusOptions(), r"requires credentials: set nats\.user and nats\.password, nats\.token"),
    ],
)
async def test_rejected_credentials_fail_at_once_and_are_named(
    configured: NatsServer, options: BusOptions, complaint: str
) -> None:
    with pytest.raises(BusUnavailable, match=complaint):
        await Bus.connect(replace(options, url=configured.url), "test", timeout=None)


async def test_a_service_waits_for_the_server_and_logs_it(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    mesh = Mesh(server.url, tmp_path)
    mesh.start("router", "router-0")
    await eventually(lambda: f"no NATS server at {server.url} yet, retrying: " in mesh.logs())
    assert "(set its URL with --nats or KVMESH_NATS_URL)" in mesh.logs()
    assert mesh.processes["router-0"].poll() is None
    server.start()
    bus = await Bus.connect(mesh.options, "test")

    async def joined() -> bool:
        infos = await bus.js.streams_info()
        return any(info.config.name == f"KV_{bus.subjects.instances_bucket}" for info in infos)

    await eventually(joined)
    await bus.close()
    mesh.stop()
    server.stop()


async def test_a_frontend_answers_probes_while_it_waits_for_the_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    mesh = Mesh(server.url, tmp_path)
    mesh.start("frontend", "frontend-0")
    async with aiohttp.ClientSession() as session:

        async def missing() -> list[str]:
            try:
                async with session.get(f"{mesh.url}/health") as answer:
                    assert answer.status == 503
                    found: list[str] = (await answer.json())["missing"]
                    return found
            except aiohttp.ClientConnectionError:
                return []

        async def waits(*reasons: str) -> bool:
            return await missing() == list(reasons)

        await eventually(lambda: waits("nats"))
        async with session.get(f"{mesh.url}/live") as answer:
            assert answer.status == 200
        async with session.post(f"{mesh.url}/v1/messages", json={}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (await answer.json())["type"] == "error"
        server.start()
        await eventually(lambda: waits("router", "worker"))
    mesh.stop()
    server.stop()


async def test_a_command_tries_once_and_names_the_setting(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    status, output = await kvmesh("status", "--nats", server.url)
    assert status == 1
    assert f"cannot use NATS at {server.url}" in output
    assert "--nats or KVMESH_NATS_URL" in output
