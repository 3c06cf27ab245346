"""The indexer's checks against workers of other versions."""

import asyncio
from typing import Any, cast

import pytest
from unit.indexer.test_rank_state import Mesh, card, stored

from kvmesh.bus.messages import ControlReply, RankKey
from kvmesh.bus.subjects import Subjects
from kvmesh.indexer.checker import IndexChecker

W = RankKey("w-1", 0)


class AnsweringBus:
    """A bus whose worker gives one answer; `asked` counts the questions."""

    subjects = Subjects("mesh")

    def __init__(self, answer: ControlReply) -> None:
        self._answer = answer
        self.asked = 0

    async def request(self, *_: object) -> ControlReply:
        self.asked += 1
        return self._answer


def checker(answer: ControlReply) -> tuple[IndexChecker, AnsweringBus]:
    mesh = Mesh()
    mesh.states.joined(card("w-1"))
    mesh.batch(0, stored(1, 2))
    bus = AnsweringBus(answer)
    return IndexChecker(cast(Any, bus), mesh.states), bus


def test_an_older_worker_which_dumps_instead_is_checked_once() -> None:
    found, bus = checker(ControlReply(True))

    async def some_rounds() -> None:
        task = asyncio.create_task(found.run(0.0001))
        while not bus.asked:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0.0001)
        task.cancel()

    asyncio.run(some_rounds())
    assert bus.asked == 1
    assert found.counts.inconclusive_checks == 1


@pytest.mark.parametrize("packed", [b"123", b"1234567890"])
def test_malformed_fingerprints_end_no_checks(packed: bytes) -> None:
    answer = ControlReply(True, blocks=9, digest=1, fingerprints=packed, next_event=1)
    found, _ = checker(answer)
    check = asyncio.run(found.check(W))
    assert (check.result, found.counts.index_differences) == ("failed", 0)


def test_events_after_the_end_of_a_wait_are_applied() -> None:
    mesh = Mesh()
    mesh.states.joined(card("w-1"))
    mesh.batch(0, stored(1, 2))
    bus = AnsweringBus(ControlReply(True, digest=1, next_event=2))
    found = IndexChecker(cast(Any, bus), mesh.states)

    async def leave() -> None:
        task = asyncio.create_task(found.check(W))
        while not bus.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        mesh.batch(1, stored(3, 4))
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(leave())
    rank = mesh.states.rank("w-1", 0)
    assert rank is not None
    assert (rank.next_event, rank.checkpoint) == (2, None)
