"""Numbers of workers that are to serve, beside those of a place that runs parked ones too."""

import asyncio
from collections.abc import Sequence

from support.wait import eventually

from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.fleet_driver import FleetDriver
from kvmesh.runtime.warnings import Warnings


class RecordingPlace:
    """Runs what is asked for; `wanted` are its numbers."""

    chooses = True

    def __init__(self, **wanted: int) -> None:
        self.wanted = wanted
        self.stopped: list[str] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def state(self) -> dict[str, PoolState]:
        return {pool: PoolState(number, (f"{pool}-0",)) for pool, number in self.wanted.items()}

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        self.wanted |= pools
        self.stopped += stop


async def test_the_place_runs_the_parked_workers_beside_those_that_serve() -> None:
    place = RecordingPlace(a=3, b=2, c=1)
    driver = FleetDriver(place, Warnings(), advisory=False, parked={"a": 2, "c": 4})
    state = await driver.state()
    assert state is not None
    assert {pool: each.wanted for pool, each in state.items()} == {"a": 1, "b": 2, "c": 0}
    assert state["a"].workers == ("a-0",)
    driver.start_change({"a": 5, "b": 1}, ["b-1"])
    await eventually(lambda: not driver.changing)
    assert place.wanted == {"a": 7, "b": 1, "c": 1}
    assert place.stopped == ["b-1"]
    await asyncio.sleep(0)
    await driver.close()
