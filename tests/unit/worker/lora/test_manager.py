"""Room for adapters that requests ask for, and those that never leave."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.adapter_folder import write_adapter

from kvmesh.bus.messages import ControlReply, LoadAdapter, UnloadAdapter, adapter_name
from kvmesh.worker.engine import Engine
from kvmesh.worker.lora import manager as module
from kvmesh.worker.lora.folder import AdapterError
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


class Adapters:
    """A manager with two places, whose adapters have the users of `users`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = AdaptableEngine()
        self.users: Counter[str] = Counter()
        self.published: list[str] = []
        self.during_yield: Callable[[], None] = lambda: None
        engine: Engine = self.engine  # type: ignore[assignment]
        self.manager = AdapterManager(engine, "e", 2, self.users.__getitem__, self.publish)
        self.manager.open("m", [])

    async def publish(self, identities: list[str]) -> None:
        left = set(self.published) - set(identities)
        self.published = identities
        if left:
            self.during_yield()

    async def load(
        self, name: str, content: int = 1, pinned: bool = False, idle_s: float = 0.0
    ) -> ControlReply:
        path = write_adapter(self.folder / f"{name}{content}", content)
        command = LoadAdapter(name=name, folder=str(path), pinned=pinned, idle_s=idle_s)
        return await self.manager.execute(command)

    @property
    def names(self) -> list[str]:
        return sorted(map(adapter_name, self.engine.loaded))


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    monkeypatch.setattr(module, "YIELD_S", 0.0)
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
    reply = await adapters.load("three", idle_s=60.0)
    assert (reply.ok, reply.no_room) == (False, True)
    assert reply.reason == "all 2 adapters were used within 60 s"
    await adapters.load("two", pinned=True)
    reply = await adapters.load("three")
    assert (reply.no_room, reply.reason) == (True, "2 adapters fit, and all are pinned")
    assert adapters.names == ["one", "two"]
    assert (await adapters.manager.execute(UnloadAdapter(name="two"))).ok
    assert (await adapters.load("three")).ok


async def test_one_that_is_used_again_while_it_yields_stays(adapters: Adapters) -> None:
    one = await adapters.load("one", idle_s=60.0)
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


async def test_a_router_replaces_nothing(adapters: Adapters, tmp_path: Path) -> None:
    await adapters.load("poet", 1)
    path = write_adapter(tmp_path / "other", 2)
    command = LoadAdapter(name="poet", folder=str(path), replace=False)
    reply = await adapters.manager.execute(command)
    assert reply.reason == "another adapter is called poet here"


async def test_without_shared_weights_no_adapter_comes_from_others(adapters: Adapters) -> None:
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
