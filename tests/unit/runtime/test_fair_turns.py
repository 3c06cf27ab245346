"""Turns in the event loop: few in a pass, of owners in turn."""

import asyncio

from kvmesh.runtime.fair_slots import FairTurns


async def test_an_owner_with_many_callers_delays_no_other() -> None:
    turns, order = FairTurns(2), list[str]()

    async def call(owner: str) -> None:
        await turns.take(owner)
        order.append(owner)

    async with asyncio.TaskGroup() as group:
        for owner in ["many"] * 20 + ["few", "other"]:
            group.create_task(call(owner))
    assert len(order) == 22
    assert order.index("few") <= 4
    assert order.index("other") <= 5


async def test_a_lone_caller_goes_on_at_once_and_one_that_is_gone_takes_no_turn() -> None:
    turns = FairTurns(1)
    alone, gone, waiting = (asyncio.create_task(turns.take(owner)) for owner in "abc")
    await asyncio.sleep(0)
    assert [task.done() for task in (alone, gone, waiting)] == [True, False, False]
    gone.cancel()
    await asyncio.wait_for(waiting, 30)
    assert gone.cancelled()
