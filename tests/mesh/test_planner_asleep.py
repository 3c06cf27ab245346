"""`kvmesh up --planner --asleep 2`: workers sleep in place of being stopped, and wake."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.up import Up
from support.wait import eventually
from support.waiting_workers import cards, complete, put_pools, workers

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Role
from kvmesh.cli.arguments import moment
from kvmesh.cli.planning.history import read_decisions

LONG_S = 120.0
pytestmark = pytest.mark.asyncio(loop_scope="module")
FLAGS = (
    *("--workers", "3", "--planner", "--asleep", "1", "--max-workers", "3"),
    *("--planner-interval-s", "0.5", "--planner-startup-s", "3", "--planner-manual-hold-s", "0"),
    *("--mock-prepare-s", "2", "--mock-startup-s", "0.2"),
)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path, *FLAGS)
    up.start()
    yield up
    up.close()


async def test_a_worker_sleeps_in_place_of_one_that_stops(
    up: Up, up_bus: Bus, directory: Directory
) -> None:
    await eventually(lambda: len(cards(directory, Role.WORKER)) == 3, LONG_S, "three serve")
    assert await asyncio.to_thread(complete, up) == 8
    before = up.children()
    await put_pools(up_bus, "workers:min=1,max=1,asleep=1")

    def settled() -> bool:
        serving, waiting = (cards(directory, role) for role in (Role.WORKER, Role.PARKED))
        return (len(serving), len(waiting), len(workers(up))) == (1, 1, 2)

    await eventually(settled, LONG_S, "one serves, one sleeps, one has stopped")
    (asleep,) = cards(directory, Role.PARKED)
    assert asleep.asleep
    assert up.children()[asleep.name] == before[asleep.name], "the same process"
    assert await asyncio.to_thread(complete, up) == 8

    # another planner takes the numbers over as they are
    planner = next(name for name in up.children() if name.startswith("planner"))
    number = up.children()[planner]
    os.kill(number, signal.SIGKILL)
    await eventually(lambda: up.children().get(planner, number) != number, LONG_S)

    await put_pools(up_bus, "workers:min=2,max=2,asleep=1")
    await eventually(
        lambda: asleep.instance in {card.instance for card in cards(directory, Role.WORKER)},
        LONG_S,
        "it wakes",
    )
    await eventually(lambda: len(cards(directory, Role.WORKER)) == 2, LONG_S)
    assert len(workers(up)) == 2, "none was started for it"
    assert await asyncio.to_thread(complete, up) == 8
    decisions = await read_decisions(up_bus, moment("1h"), None)
    assert any(decision.sleep for decision in decisions)
    assert {d.pools["workers"].asleep for d in decisions} == {0, 1}
    assert "Traceback" not in up.output
