"""A mesh over two sites: a hub and a leaf node with a JetStream domain of its own, or a gateway."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.mesh import Mesh
from support.sites import Accounts, Gateways, Site
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusError, NoResponder, ServerUnfit
from kvmesh.bus.messages import MessageDecoder
from kvmesh.bus.permissions import User, inbox_prefix, permissions
from kvmesh.bus.streams import keeper as keeping
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams, mesh_streams
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.streams.preparation import prepare_streams
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.streams.server_check import check_server
from kvmesh.bus.subjects import Subjects, api_of

NAMESPACE = "far"
SMALL = StreamLimits(kv_bytes=2 << 20, route_bytes=1 << 20, seq_bytes=1 << 20)
PROMPT = "one two three four five six seven eight nine ten " * 20


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    subjects, hub = Subjects(NAMESPACE), api_of("hub")
    site = Site(
        tmp_path, {user: permissions(subjects, user, user, api=hub) for user in USERS_AT_LEAF}
    )
    site.start()
    yield site
    site.stop()


USERS_AT_LEAF = (User.WORKER, User.ROUTER)


def at_leaf(site: Site, user: str) -> dict[str, str]:
    return {
        "KVMESH_NATS_URL": site.leaf.url,
        "KVMESH_NATS_DOMAIN": "hub",
        "KVMESH_NATS_USER": user,
        "KVMESH_NATS_PASSWORD": user,
        "KVMESH_NATS_INBOX_PREFIX": inbox_prefix(user),
    }


async def test_a_mesh_spans_hub_and_leaf(site: Site, tmp_path: Path) -> None:
    mesh = Mesh(site.hub.url, tmp_path, {"KVMESH_MOCK_SPEEDUP": "20"}, NAMESPACE)
    mesh.start("indexer", "indexer-0")
    mesh.start("frontend", "frontend-0")
    hub = BusOptions(url=site.leaf.url, user="open", password="open", api_prefix=api_of("hub"))
    bus = await Bus.connect(hub, "test")

    async def reachable() -> bool:
        try:
            return len(await mesh_streams(bus)) == 0  # of another namespace
        except BusError:
            return False

    await eventually(reachable, what="the leaf is connected")
    for role in USERS_AT_LEAF:
        mesh.start(role, f"{role}-0", **at_leaf(site, role))
    await mesh.ready()
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        for _ in range(2):
            answer = await client.completions.create(
                model="kvmesh-demo", prompt=PROMPT, max_tokens=8
            )
            assert answer.usage
            assert answer.usage.completion_tokens == 8
    done = await mesh.command(
        "doctor",
        KVMESH_NATS_PASSWORD="open",
        **{name: text for name, text in at_leaf(site, "open").items() if "PASSWORD" not in name},
    )
    assert "equal to the workers" in done.stdout, done.stdout + done.stderr
    assert "JetStream domain hub" in done.stdout
    local = await Bus.connect(BusOptions(url=site.leaf.url, user="open", password="open"), "test")
    assert await local.js.streams_info() == []
    for each in (bus, local):
        await each.close()
    mesh.stop()


async def test_a_process_at_a_leaf_waits_for_the_link_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeping, "CHECK_S", 0.1)
    monkeypatch.setattr(keeping, "SPACING_S", 0.0)
    site, reason = Site(tmp_path, {}), "no JetStream answers under $JS.hub.API: this server's link"
    site.leaf.start()
    options = BusOptions(site.leaf.url, user="open", password="open", api_prefix=api_of("hub"))
    bus = await Bus.connect(options, "test")
    preparing = asyncio.create_task(prepare_streams(bus, SMALL))
    await eventually(lambda: reason in caplog.text)
    command = await Bus.connect(options, "command", once=True)
    with pytest.raises(ServerUnfit, match="link"):
        await prepare_streams(command, SMALL)
    await asyncio.to_thread(site.hub.start)
    await preparing
    warnings: dict[str, Mapping[str, str]] = {}
    keeping_whole = asyncio.create_task(keeper_of(bus).run(warnings.__setitem__, tells=False))
    await eventually(lambda: "not_stored" in warnings)
    site.hub.kill()
    await eventually(lambda: reason in str(warnings["not_stored"]))
    await asyncio.to_thread(site.hub.start)
    await eventually(lambda: not any(warnings.values()))
    keeping_whole.cancel()
    for each in (bus, command):
        await each.close()
    site.stop()


async def test_a_leaf_without_jetstream_reaches_that_of_the_hub_by_its_domain(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, {})
    site.leaf.jetstream = None
    site.leaf.settings = site.leaf.settings.replace("jetstream: enabled, ", "")
    site.start()
    own = BusOptions(url=site.leaf.url, user="open", password="open")
    bus = await Bus.connect(replace(own, api_prefix=api_of("hub")), "test")

    async def ready() -> bool:
        try:
            return await check_server(bus) == "hub"
        except BusError:
            return False

    await eventually(ready)
    assert await ensure_streams(bus, SMALL) == []
    keys = await bus.js.key_value(bus.subjects.plan_bucket)
    await keys.put("key", b"value")
    assert (await keys.get("key")).value == b"value"
    other = await Bus.connect(own, "test")
    with pytest.raises(ServerUnfit, match=r"at a leaf node set nats\.domain"):
        await check_server(other)
    for each in (bus, other):
        await each.close()
    site.stop()


async def test_a_mesh_uses_streams_of_another_account(tmp_path: Path) -> None:
    """An import leads to them, under a prefix that is no domain's."""
    accounts = Accounts(tmp_path, NAMESPACE)
    accounts.server.start()
    env = {
        "KVMESH_NATS_USER": "mesh",
        "KVMESH_NATS_PASSWORD": "mesh",
        "KVMESH_NATS_API_PREFIX": Accounts.PREFIX,
        "KVMESH_MOCK_SPEEDUP": "20",
    }
    mesh = Mesh(accounts.server.url, tmp_path, env, NAMESPACE)
    mesh.start_all(1)
    await mesh.ready()
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        for _ in range(2):
            answer = await client.completions.create(
                model="kvmesh-demo", prompt=PROMPT, max_tokens=8
            )
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens
    done = await mesh.command("doctor")
    assert (done.returncode, "equal to the workers" in done.stdout) == (0, True), done.stdout
    own = BusOptions(
        accounts.server.url, NAMESPACE, user="mesh", password="mesh", api_prefix=Accounts.PREFIX
    )
    bus = await Bus.connect(own, "test")
    await bus.js.context.delete_stream(bus.subjects.kv_stream)

    async def again() -> bool:
        return bus.subjects.kv_stream in {info.config.name for info in await mesh_streams(bus)}

    await eventually(again, what="a lost stream is made again")
    mesh.stop()
    read = 0

    def count(_: StreamMessage) -> None:
        nonlocal read
        read += 1

    for _ in range(100):  # with flow control
        await bus.store(bus.subjects.kv("m", "w"), bytes(64 << 10), PATIENCE_S)
    kv = bus.subjects.kv_stream
    reader = StreamReader(bus, kv, bus.subjects.kv("m", "w"), count, Start())
    await reader.open()
    await eventually(lambda: read == 100)
    await reader.close()
    await bus.close()
    accounts.server.stop()


async def test_a_process_across_a_gateway_uses_the_streams_of_the_other_cluster(
    tmp_path: Path,
) -> None:
    gateways = Gateways(tmp_path)
    gateways.start()
    near = await Bus.connect(BusOptions(url=gateways.near[0].url, replicas=3), "near")
    far = await Bus.connect(BusOptions(url=gateways.far.url, replicas=3), "far")

    async def ready() -> bool:
        try:
            return await ensure_streams(far, SMALL) == []
        except BusError:
            return False

    await eventually(ready)
    await near.store(near.subjects.kv("m", "w"), b"near", PATIENCE_S)
    await far.store(far.subjects.kv("m", "w"), b"far", PATIENCE_S)
    await far.serve("echo", MessageDecoder(bytes), lambda data, reply: reply(data))
    await eventually(lambda: answers(near))
    read: list[bytes] = []
    stream, subject = far.subjects.kv_stream, far.subjects.kv_all
    reader = StreamReader(far, stream, subject, lambda message: read.append(message.data), Start())
    await reader.open()
    await eventually(lambda: read == [b"near", b"far"])
    await reader.close()
    for bus in (near, far):
        await bus.close()
    gateways.stop()


async def answers(bus: Bus) -> bool:
    try:
        return await bus.request("echo", b"x", MessageDecoder(bytes), PATIENCE_S) == b"x"
    except NoResponder:
        return False
