"""The behaviour of all connectors to places where workers run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.places.on_bus import BusPlace
from support.places.on_kubernetes import KubernetesPlace
from support.places.place import POOLS, Place
from support.places.scripts import CommandPlace, ComposePlace
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.planner.connectors.interface import Connector, ConnectorError

KINDS = ("deployment", "statefulset", "leaderworkerset")


@pytest_asyncio.fixture(params=["bucket", "command", "compose", "old compose", *KINDS])
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bus: Bus
) -> AsyncIterator[Place]:
    match request.param:
        case "bucket":
            place: Place = BusPlace(bus)
        case "command":
            place = CommandPlace(tmp_path)
        case "compose" | "old compose" as version:
            place = ComposePlace(tmp_path, monkeypatch, old=version != "compose")
        case kind:
            place = KubernetesPlace(tmp_path, monkeypatch, kind)
    await place.start()
    yield place
    await place.close()


@pytest_asyncio.fixture
async def connector(place: Place) -> AsyncIterator[Connector]:
    connector = place.connector()
    await connector.open()
    yield connector
    await connector.close()


async def numbers(connector: Connector) -> dict[str, int]:
    return {pool: state.wanted for pool, state in (await connector.state()).items()}


async def check(place: Place, connector: Connector, wanted: dict[str, int]) -> None:
    """The place runs the wanted workers, and the connector reports them."""
    states = await connector.state()
    for pool, number in wanted.items():
        running = await place.running(pool)
        assert len(running) == number
        assert states[pool].wanted == number
        assert set(states[pool].workers) in (set(running), set())


async def test_the_state_is_that_of_the_place(place: Place, connector: Connector) -> None:
    await check(place, connector, POOLS)


async def test_several_pools_grow_and_shrink_at_once(place: Place, connector: Connector) -> None:
    await connector.scale({"east": 4, "west": 1})
    await check(place, connector, {"east": 4, "west": 1})
    await connector.scale({"east": 2, "west": 3})
    await check(place, connector, {"east": 2, "west": 3})


async def test_pools_that_are_not_named_stay(place: Place, connector: Connector) -> None:
    await connector.scale({"east": 3})
    await check(place, connector, {**POOLS, "east": 3})


async def test_a_pool_shrinks_to_nothing_and_returns(place: Place, connector: Connector) -> None:
    await connector.scale({"west": 0})
    await check(place, connector, {**POOLS, "west": 0})
    await connector.scale({"west": 1})
    await check(place, connector, {**POOLS, "west": 1})


async def test_the_same_numbers_again_change_nothing(place: Place, connector: Connector) -> None:
    await connector.scale({"east": 3, "west": 1})
    names, changes = await place.running("east"), place.changes
    await connector.scale({"east": 3, "west": 1})
    await connector.scale({"east": 3}, stop=names[:1])
    assert await place.running("east") == names
    assert place.changes == changes


async def test_the_named_workers_end_first(place: Place, connector: Connector) -> None:
    if not connector.chooses:
        pytest.skip("the place chooses")
    await connector.scale({"east": 4})
    names = (await connector.state())["east"].workers
    victims = [names[0], names[2]]
    await connector.scale({"east": 2}, stop=victims)
    assert set(await place.running("east")) == set(names) - set(victims)
    await connector.scale({"east": 4})
    again = (await connector.state())["east"].workers
    await connector.scale({"east": 3}, stop=again[:1])
    assert set(await place.running("east")) == set(again[1:])


async def test_the_last_worker_of_the_state_ends_next(place: Place, connector: Connector) -> None:
    await connector.scale({"east": 4})
    names = (await connector.state())["east"].workers
    await connector.scale({"east": 2})
    assert names[:2] == () or set(await place.running("east")) == set(names[:2])


async def test_a_change_by_hand_is_seen_and_reverted(place: Place, connector: Connector) -> None:
    await connector.scale({"east": 2})
    await place.set("east", 4)

    async def seen() -> bool:
        return await numbers(connector) == {**POOLS, "east": 4}

    await eventually(seen)
    await connector.scale({"east": 2})
    await check(place, connector, {**POOLS, "east": 2})


async def test_an_unreachable_place_is_an_error_with_its_cause(place: Place) -> None:
    connected = place.connector(place.cut_timeout_s)
    await connected.state()
    await place.cut()
    fresh = place.connector(place.cut_timeout_s)
    async with asyncio.timeout(PATIENCE_S):
        for call in (fresh.open, connected.state, fresh.state):
            with pytest.raises(ConnectorError, match=place.silence):
                await call()
        for each in (connected, fresh):
            with pytest.raises(ConnectorError, match=place.silence) as caught:
                await each.scale({"east": 2})
            assert not caught.value.permanent
    await connected.close()
    await fresh.close()
