"""Checks that share wake-ups."""

import asyncio

from kvmesh.bus.ticks import next_tick


async def test_waits_that_begin_apart_end_together() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        await next_tick(0.02)
        ended.append(number)

    waits = [asyncio.create_task(wait(0))]
    await next_tick(0.01)  # between two ticks of the others, or with them
    waits.append(asyncio.create_task(wait(1)))
    await asyncio.wait(waits)
    assert ended == [0, 1]


async def test_an_event_ends_a_wait() -> None:
    sooner = asyncio.Event()
    wait = asyncio.create_task(next_tick(3600.0, sooner))
    await asyncio.sleep(0)
    assert not wait.done()
    sooner.set()
    await wait


async def test_periods_of_more_than_a_second_share_the_wake_ups_of_a_second() -> None:
    waits = [asyncio.create_task(next_tick(period)) for period in (1.0, 1.5)]
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    assert not pending
