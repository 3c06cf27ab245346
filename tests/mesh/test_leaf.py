"""A mesh over a hub and a leaf node that has a JetStream domain of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from openai import AsyncOpenAI
from support.leaf import Site
from support.mesh import Mesh
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusError
from kvmesh.bus.permissions import User, inbox_prefix, permissions
from kvmesh.bus.streams.configuration import mesh_streams
from kvmesh.bus.subjects import Subjects, api_of

NAMESPACE = "far"
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
