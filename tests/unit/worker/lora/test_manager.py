"""Room for adapters that requests ask for, and those that never leave."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.adapter_folder import write_adapter

from kvmesh.bus.messages import (
    ControlReply,
    LoadAdapter,
    TakeAdapter,
    UnloadAdapter,
    adapter_identity,
    adapter_name,
)
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.engine import Engine
from kvmesh.worker.lora import departures
from kvmesh.worker.lora.copies import AdapterCopies
from kvmesh.worker.lora.folder import AdapterError, read_adapter
from kvmesh.worker.lora.manager import AdapterManager


class AdaptableEngine:
    """An engine that records what it has loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def max_adapter_rank(self) -> int:
        return 0

    async def load_adapter(self, identity: str, folder: Path) -> None:
        self.loaded.append(identity)

    async def unload_adapter(self, identity: str) -> None:
        self.loaded.remove(identity)


class OneStore:
    """Two workers of one node, whose copies are in one store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def store(self) -> WeightStore:
        return WeightStore(self._directory, 1 << 20)

    async def fetch(self, digest: str, timeout_s: float) -> StoredCopy:
        found = self.store().open(digest)
        assert found is not None
        return found

    async def offer(self, copy: StoredCopy) -> None: ...

    def withdraw(self, digest: str) -> None: ...


async def offered() -> None: ...


class Adapters:
    """A manager with two places, whose adapters have the users of `users`."""

    def __init__(self, folder: Path, shares: bool = True) -> None:
        self.folder = folder
        self.engine = AdaptableEngine()
        self.users: Counter[str] = Counter()
        self.published: list[str] = []
        self.during_yield: Callable[[], None] = lambda: None
        engine: Engine = self.engine  # type: ignore[assignment]
        exchange = OneStore(folder / "store")
        self.source = AdapterCopies(exchange, lambda _: True, offered)
        self.manager = AdapterManager(
            engine,
            "e",
            2,
            self.users.__getitem__,
            self.publish,
            exchange=exchange if shares else None,
        )
        self.manager.open("m", [])

    async def publish(self, identities: list[str]) -> None:
        left = set(self.published) - set(identities)
        self.published = identities
        if left:
            self.during_yield()

    async def load(self, name: str, content: int = 1, pinned: bool = False) -> ControlReply:
        path = write_adapter(self.folder / f"{name}{content}", content)
        command = LoadAdapter(name=name, folder=str(path), pinned=pinned)
        return await self.manager.execute(command)

    async def take(self, name: str, content: int = 1, idle_s: float = 0.0) -> ControlReply:
        """Load an adapter as for a router, from the copy in another worker's store."""
        folder = read_adapter(write_adapter(self.folder / f"{name}{content}", content))
        identity = adapter_identity(name, folder.digest)
        await self.source.offer(identity, folder)
        digest = self.source.files[-1].digest
        command = TakeAdapter(adapter=identity, files=digest, idle_s=idle_s)
        return await self.manager.execute(command)

    @property
    def names(self) -> list[str]:
        return sorted(map(adapter_name, self.engine.loaded))


@pytest.fixture
async def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    monkeypatch.setattr(departures, "YIELD_S", 0.0)
    return Adapters(tmp_path)


async def test_the_least_recently_used_one_makes_room(adapters: Adapters) -> None:
    one = await adapters.load("one")
    await adapters.load("two")
    adapters.manager.used(one.adapter)
    reply = await adapters.load("three")
    assert reply.ok, reply.reason
    assert adapters.names == ["one", "three"]
    assert sorted(map(adapter_name, adapters.published)) == ["one", "three"]


async def test_pinned_and_recently_used_ones_stay(adapters: Adapters) -> None:
    await adapters.load("one", pinned=True)
    await adapters.load("two")
    reply = await adapters.take("three", idle_s=60.0)
    assert (reply.ok, reply.no_room) == (False, True)
    assert reply.reason == "all 2 adapters were used within 60 s"
    await adapters.load("two", pinned=True)
    reply = await adapters.load("three")
    assert (reply.no_room, reply.reason) == (True, "2 adapters fit, and all are pinned")
    assert adapters.names == ["one", "two"]
    assert (await adapters.manager.execute(UnloadAdapter(name="two"))).ok
    assert (await adapters.load("three")).ok


async def test_one_that_is_used_again_while_it_yields_stays(adapters: Adapters) -> None:
    one = await adapters.load("one")
    await adapters.load("two", pinned=True)

    def use() -> None:
        assert adapters.manager.admitted.count(one.adapter) == 1, "late requests are accepted"
        adapters.users[one.adapter] = 1

    adapters.during_yield = use
    reply = await adapters.load("three")
    assert (reply.ok, reply.no_room) == (False, True)
    assert reply.reason == f"1 requests have just begun to use {one.adapter}"
    assert adapters.names == ["one", "two"]
    assert one.adapter in adapters.published
    assert not adapters.manager.has_yielded(one.adapter)


async def test_a_request_that_comes_too_late_is_known_to_be_of_an_unloaded_adapter(
    adapters: Adapters,
) -> None:
    one = await adapters.load("one")
    await adapters.load("two", pinned=True)
    assert (await adapters.load("three")).ok
    assert adapters.manager.has_yielded(one.adapter)
    assert one.adapter not in adapters.manager.admitted
    assert (await adapters.manager.execute(UnloadAdapter(name="three"))).ok
    assert (await adapters.load("one")).ok
    assert not adapters.manager.has_yielded(one.adapter)


async def test_an_adapter_with_requests_stays(adapters: Adapters) -> None:
    one = await adapters.load("one")
    two = await adapters.load("two")
    adapters.users[one.adapter] = 1
    assert (await adapters.load("three")).ok
    assert adapters.names == ["one", "three"]
    adapters.users.update(adapters.engine.loaded)
    reply = await adapters.load("two")
    assert (reply.no_room, reply.adapter) == (True, "")
    assert reply.reason == "2 adapters fit, and requests use all that may leave"
    assert two.adapter not in adapters.published


async def test_a_router_replaces_and_pins_nothing(adapters: Adapters) -> None:
    await adapters.load("poet", 1)
    reply = await adapters.take("poet", 2)
    assert reply.reason == "another adapter is called poet here"
    taken = await adapters.take("critic")
    assert taken.ok, taken.reason
    assert adapters.manager.host is not None
    assert taken.adapter in adapters.manager.host.removable
    assert (await adapters.load("critic", pinned=True)).adapter == taken.adapter
    assert taken.adapter not in adapters.manager.host.removable


async def test_a_command_without_a_folder_and_an_adapter_reads_nothing(adapters: Adapters) -> None:
    reply = await adapters.manager.execute(LoadAdapter(name="poet"))
    assert reply.reason == "the command names neither a folder nor an adapter"


async def test_without_shared_weights_no_adapter_comes_from_others(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, shares=False)
    assert adapters.manager.host is None
    command = LoadAdapter(name="poet", adapter="poet@" + "1" * 16, files="f" * 64)
    reply = await adapters.manager.execute(command)
    assert reply.reason == "unsupported: weights.share of this worker is off"


async def test_an_engine_that_keeps_an_adapter_has_no_room(adapters: Adapters) -> None:
    one = await adapters.load("one")
    await adapters.load("two", pinned=True)

    async def keeps(identity: str) -> None:
        raise AdapterError("it is stuck")

    unload, adapters.engine.unload_adapter = adapters.engine.unload_adapter, keeps  # type: ignore[method-assign]
    reply = await adapters.load("three")
    assert (reply.ok, reply.reason) == (False, "it is stuck")
    assert one.adapter not in adapters.manager.admitted
    adapters.engine.unload_adapter = unload  # type: ignore[method-assign]
    assert (await adapters.load("one")).ok
    assert one.adapter in adapters.published
