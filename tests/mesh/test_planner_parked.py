"""`kvmesh up --planner --parked 1`: parked workers are promoted where others are missing."""

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

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG_S = 120.0
FLAGS = (
    *("--workers", "2", "--planner", "--parked", "1", "--max-workers", "3"),
    *("--planner-interval-s", "0.5", "--planner-startup-s", "3", "--planner-manual-hold-s", "0"),
    *("--mock-prepare-s", "2", "--mock-startup-s", "0.2"),
)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path, *FLAGS)
    up.start()
    yield up
    up.close()


def settled(directory: Directory) -> bool:
    serving, parked = (cards(directory, role) for role in (Role.WORKER, Role.PARKED))
    return (len(serving), len(parked)) == (2, 1)


async def test_a_parked_worker_replaces_one_that_dies(
    up: Up, up_bus: Bus, directory: Directory
) -> None:
    await eventually(lambda: settled(directory), LONG_S, "two workers serve, one is parked")
    assert await asyncio.to_thread(complete, up) == 8
    (spare,) = cards(directory, Role.PARKED)
    victim, other = cards(directory, Role.WORKER)
    os.kill(up.children()[victim.name], signal.SIGKILL)
    await eventually(
        lambda: spare.instance in {card.instance for card in cards(directory, Role.WORKER)},
        LONG_S,
        "the parked worker serves",
    )
    await eventually(lambda: settled(directory), LONG_S, "the one that died is parked")
    (parked,) = cards(directory, Role.PARKED)
    assert parked.name == victim.name
    serving = {card.name: card for card in cards(directory, Role.WORKER)}
    assert set(serving) == {other.name, spare.name}
    promoted = serving[spare.name]
    assert 0.2 < promoted.promoted_s < promoted.startup_s
    assert await asyncio.to_thread(complete, up) == 8

    await eventually(lambda: settled(directory), LONG_S)
    await put_pools(up_bus, "workers:min=3,max=3,parked=1")
    await eventually(
        lambda: parked.instance in {card.instance for card in cards(directory, Role.WORKER)},
        LONG_S,
        "the other parked worker serves as the third",
    )
    await eventually(lambda: len(cards(directory, Role.PARKED)) == 1, LONG_S, "another one parks")
    assert len(cards(directory, Role.WORKER)) == 3
    await put_pools(up_bus, "workers:min=1,max=1,parked=1")
    await eventually(lambda: len(cards(directory, Role.WORKER)) == 1, LONG_S, "one worker serves")
    await eventually(lambda: len(workers(up)) == 2, LONG_S, "one is parked")
    assert len(cards(directory, Role.PARKED)) == 1
    decisions = await read_decisions(up_bus, moment("1h"), None)
    grown = [d.pools["workers"] for d in decisions if d.pools["workers"].wanted == 3]
    assert grown
    assert 0 < grown[-1].promotion_s < grown[-1].startup_s
    assert await asyncio.to_thread(complete, up) == 8
    assert "Traceback" not in up.output
