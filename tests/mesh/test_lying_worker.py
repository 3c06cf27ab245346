"""A worker that lies on its card harms itself alone, in a mesh of `kvmesh secure`.

It has the credentials of its own user and no others.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace
from support.indexing import Replicas
from support.mesh import Mesh
from support.secured import SecuredServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import RECORD, read_cards
from kvmesh.bus.discovery.directory import MAX_NAMESAKES
from kvmesh.bus.messages import (
    Capacity,
    Cleared,
    Instance,
    KvBatch,
    ModelCard,
    Role,
    Stored,
    encode,
)
from kvmesh.bus.storage.model_files import pack
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.indexer import rank_state

pytestmark = pytest.mark.asyncio(loop_scope="module")
RENEW_S = 0.5
LIAR = "worker.evil-0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("secured")
    server = SecuredServer(folder, "--workers", "good-0,good-1,evil-0")
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    server: SecuredServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    mesh = Mesh(server.url, folder, {"KVMESH_MOCK_SPEEDUP": "20"}, namespace="kvmesh")
    try:
        mesh.start("indexer", "indexer-0", **server.env("indexer"))
        for name in ("router-0", "router-1"):
            mesh.start("router", name, **server.env("router"))
        for name in ("good-0", "good-1"):
            mesh.start("worker", name, **server.env(f"worker.{name}"))
        mesh.start("frontend", "frontend-0", **server.env("frontend"))
        await mesh.ready(60)
        yield mesh
    finally:
        mesh.stop()


class Liar:
    """A card in the bucket, renewed as a worker does; it takes no requests."""

    def __init__(self, bus: Bus, suffix: str) -> None:
        self._bus = bus
        self._bucket = bus.bucket(bus.subjects.instances_bucket)
        self.instance = f"evil-0-{suffix}"
        self.key = bus.subjects.lease_key(Role.WORKER, self.instance)
        self.stated: Instance | None = None

    async def state(self, card: Instance) -> None:
        """Replace the card, of which only the identity has to be its own."""
        self.stated = replace(card, instance=self.instance, name="evil-0", started=0.0)
        await self._bucket.put(self.key, encode(self.stated))

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self.stated is not None:
                await self._bucket.put(self.key, encode(self.stated))


@contextlib.asynccontextmanager
async def lying(server: SecuredServer, suffix: str) -> AsyncIterator[Liar]:
    async with server.connected(LIAR) as bus:
        liar = Liar(bus, suffix)
        task = asyncio.create_task(liar.renew())
        try:
            yield liar
        finally:
            task.cancel()
            await asyncio.wait([task])
            await bus.bucket(bus.subjects.instances_bucket).delete(liar.key)


async def honest(server: SecuredServer) -> tuple[Instance, ModelCard]:
    async with server.connected("observer") as bus:
        cards = await read_cards(bus, Role.WORKER)
    card = next(card for card in cards if card.name.startswith("good-"))
    assert card.model is not None
    return card, card.model


async def seen(server: SecuredServer, liar: Liar) -> None:
    """Return once every reader can have read the liar's card."""

    async def stored() -> bool:
        async with server.connected("observer") as bus:
            return liar.instance in {card.instance for card in await read_cards(bus, Role.WORKER)}

    await eventually(stored)


async def answers(mesh: Mesh, count: int = 6) -> list[tuple[int, str]]:
    """Status and text of short requests, each with a prompt of more than two blocks."""
    found = []
    async with httpx.AsyncClient(timeout=60) as client:
        for number in range(count):
            body = {
                "model": "kvmesh-demo",
                "prompt": f"{number} is a number. " * 12,
                "max_tokens": 4,
            }
            reply = await client.post(f"{mesh.url}/v1/completions", json=body)
            found.append((reply.status_code, reply.text))
    return found


async def all_served(mesh: Mesh) -> None:
    found = await answers(mesh)
    assert [status for status, _ in found] == [200] * len(found), found


@pytest.mark.parametrize("dated", [False, True], ids=["without a record", "with a record"])
async def test_a_newcomer_that_states_another_block_size_shuts_out_nobody(
    mesh: Mesh, server: SecuredServer, dated: bool
) -> None:
    card, model = await honest(server)
    async with lying(server, f"size{dated}") as liar:
        if dated:
            bucket = liar._bus.bucket(liar._bus.subjects.instances_bucket)
            await bucket.put(f"{liar.key}{RECORD}", b"")
        await liar.state(replace(card, model=replace(model, block_size=32)))
        await seen(server, liar)
        await all_served(mesh)
        for name in ("router-0", "router-1", "frontend-0"):
            mesh.kill(name)
            mesh.restart(name)
            await mesh.ready()
            await all_served(mesh)
        mesh.kill("good-0")
        mesh.restart("good-0")
        await eventually(lambda: mesh.logs().count("serving kvmesh-demo") >= 1)
        await all_served(mesh)
        assert "not joining" not in mesh.logs()


async def test_a_worker_that_changes_its_card_takes_nobody_with_it(
    mesh: Mesh, server: SecuredServer, tmp_path: Path
) -> None:
    """It has been there for a while, and each router and frontend has started since."""
    card, model = await honest(server)
    async with lying(server, "turns") as liar:
        await liar.state(card)
        await seen(server, liar)
        for name in ("good-0", "good-1"):  # so that the liar is the oldest by the server's record
            mesh.kill(name)
            mesh.restart(name)
            await mesh.ready()
        await all_served(mesh)
        false: list[ModelCard] = [
            replace(model, block_size=32),
            replace(model, tokenizer="", template="", files="f" * 64),
            replace(model, weights="f" * 64, context=1),
            replace(model, tool_parser="nonsense", reasoning_parser="nonsense"),
        ]
        for stated in false:
            await liar.state(replace(card, model=stated))
            await seen(server, liar)
            await all_served(mesh)
            for name in ("router-0", "frontend-0"):
                mesh.kill(name)
                mesh.restart(name)
                await mesh.ready()
            await all_served(mesh)


async def test_other_files_of_a_compatible_card_change_no_prompt(
    mesh: Mesh, server: SecuredServer, tmp_path: Path
) -> None:
    card, model = await honest(server)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert pack(tmp_path)
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "kvmesh-demo", "prompt": "One prompt. " * 12}
        before = (await client.post(f"{mesh.url}/tokenize", json=body)).json()
        async with lying(server, "files") as liar:
            await liar.state(replace(card, model=replace(model, tokenizer="", files="f" * 64)))
            await seen(server, liar)
            await all_served(mesh)
            assert (await client.post(f"{mesh.url}/tokenize", json=body)).json() == before


@pytest.mark.parametrize("field", ["ranks", "name", "adapters", "labels"])
async def test_a_card_with_endless_fields_is_ignored(
    mesh: Mesh, server: SecuredServer, field: str
) -> None:
    """A server ends the connection that names a subject as long as one of these."""
    card, model = await honest(server)
    capacity = Capacity(blocks=1, max_sequences=1, max_batched_tokens=1, dp_ranks=1_000_000_000)
    stated = {
        "ranks": replace(card, capacity=capacity),
        "name": replace(card, model=replace(model, name="m" * 5000)),
        "adapters": replace(card, model=replace(model, adapters=["a"] * 20_000)),
        "labels": replace(card, labels={"label": "l" * 800_000}),
    }
    async with lying(server, field) as liar:
        await liar.state(stated[field])
        await eventually(lambda: f"worker.evil-0.{field}" in mesh.logs())
        await all_served(mesh)
    assert "reconnecting" not in mesh.logs()


async def test_a_worker_under_hundreds_of_instances_is_a_few(
    mesh: Mesh, server: SecuredServer
) -> None:
    card, model = await honest(server)
    async with lying(server, "first") as liar:
        names = [f"n{number}" for number in range(200)]
        for name in names:
            liar.instance = f"evil-0-{name}"
            liar.key = liar._bus.subjects.lease_key(Role.WORKER, liar.instance)
            await liar.state(replace(card, model=replace(model, name=name)))
        await eventually(lambda: "ignored further instances of worker evil-0" in mesh.logs())
        await all_served(mesh)
        async with httpx.AsyncClient() as client:
            listed = (await client.get(f"{mesh.url}/v1/models")).json()["data"]
        assert len({model["id"] for model in listed} & set(names)) <= MAX_NAMESAKES


async def test_a_worker_cannot_fill_the_memory_of_an_indexer(
    mesh: Mesh, server: SecuredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the names of many models, from instances with and without a card, on any rank."""
    monkeypatch.setattr(rank_state, "MAX_BLOCKS", most := 1 << 18)
    per_message = 1 << 13
    sent = 6 * most // per_message
    capacity = Capacity(blocks=1 << 40, max_sequences=1, max_batched_tokens=1, dp_ranks=64)
    card, model = await honest(server)
    async with AsyncExitStack() as stack, lying(server, "flood") as liar:
        limits = StreamLimits()
        replica = await Replicas(server.options("indexer"), limits, stack).start()
        states, warnings = replica.indexer.states, replica.service.warnings
        await liar.state(replace(card, model=replace(model, name="m0"), capacity=capacity))
        await eventually(lambda: liar.instance in states.incarnations)
        started = states.counts.batches
        for number in range(sent):
            blocks = os.urandom(8 * per_message)
            has_card = number % 2
            instance = liar.instance if has_card else f"evil-0-{number}"
            rank, turn = divmod(number, 2)[0] % 8, number // 16 if has_card else 0
            events = [Stored(number % 4, None, blocks, blocks, number)]
            first = turn + 1 if turn else 0
            batch = KvBatch("evil-0", instance, rank, first, 0.0, [*[Cleared()][turn:], *events])
            subject = liar._bus.subjects.kv(f"m{number % 8 if has_card else number}", "evil-0")
            await liar._bus.js.publish(subject, encode(batch))
            assert replica.indexer.figures()["blocks"] <= most
        await eventually(lambda: states.counts.batches - started >= sent)
        assert per_message < replica.indexer.figures()["blocks"] <= most
        assert states.full == ["evil-0"]
        await eventually(lambda: any("evil-0 reports more than" in text for text in warnings.texts))
        assert len(states.rank_numbers()) <= 64 + 4  # its own, one without a card, the others'
    await all_served(mesh)
