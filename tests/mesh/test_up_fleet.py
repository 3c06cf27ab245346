"""`kvmesh up` runs the workers that the wanted fleet in the plan bucket asks for."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.up import Up, alive
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.planner.connectors.bucket import BucketConnector
from kvmesh.planner.connectors.interface import ConnectorError, PoolState

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), "--workers", "1", "--max-workers", "3")
    up.start()
    yield up
    up.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus(up: Up) -> AsyncIterator[Bus]:
    await up.ready()
    bus = await Bus.connect(up.options, "test")
    yield bus
    await bus.close()


def workers(up: Up) -> dict[str, int]:
    return {name: pid for name, pid in up.children().items() if name.startswith("worker")}


async def test_workers_come_and_go_as_wanted(up: Up, bus: Bus) -> None:
    connector = BucketConnector(bus, 60.0, "planner-test")
    await connector.open()
    assert await connector.state() == {"workers": PoolState(1, ("worker-0",))}
    first = workers(up)
    await connector.scale({"workers": 3})
    names = ("worker-0", "worker-1", "worker-2")
    assert await connector.state() == {"workers": PoolState(3, names)}
    await eventually(lambda: set(workers(up)) == set(names))
    await eventually(lambda: up.output.count("serving") >= 3)
    three = workers(up)
    await connector.scale({"workers": 1}, stop=["worker-0"])
    assert await connector.state() == {"workers": PoolState(1, ("worker-1",))}
    await eventually(lambda: set(workers(up)) == {"worker-1"})
    await eventually(lambda: not any(alive(three[name]) for name in ("worker-0", "worker-2")))
    assert workers(up)["worker-1"] == three["worker-1"]
    assert first.keys() == {"worker-0"}
    assert await asyncio.to_thread(up.serves)
    assert "restarting" not in up.output
    assert "killed" not in up.output
    assert "starting worker-1, worker-2 as planner-test wants" in up.output
    assert "stopping worker-0, worker-2 as planner-test wants" in up.output


async def test_more_workers_than_permitted_are_refused(up: Up, bus: Bus) -> None:
    connector = BucketConnector(bus, 60.0)
    with pytest.raises(ConnectorError, match="4 workers of pool workers exceed 3"):
        await connector.scale({"workers": 4})
    assert (await connector.state())["workers"].wanted == 3
    await connector.scale({"workers": 1})
    await eventually(lambda: len(workers(up)) == 1)


async def test_a_new_start_runs_its_own_number_of_workers(tmp_path: Path) -> None:
    up = Up(tmp_path, "--workers", "1")
    try:
        up.start()
        await up.ready()
        bus = await Bus.connect(up.options, "test")
        await BucketConnector(bus, 60.0).scale({"workers": 2})
        await bus.close()
        up.close()
        up.lines.clear()
        up.start()
        await up.ready()
        bus = await Bus.connect(up.options, "test")
        connector = BucketConnector(bus, 60.0)
        assert (await connector.state())["workers"].wanted == 1
        await connector.scale({"workers": 2})
        await eventually(lambda: len(workers(up)) == 2)
        await bus.close()
    finally:
        up.close()
