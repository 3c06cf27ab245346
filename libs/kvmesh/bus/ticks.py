"""Periodic checks of one process, all in the same wake-ups."""

import asyncio
from math import floor

EARLY_S = 0.002  # by which a timer may fire early: the loop counts milliseconds


async def next_tick(period_s: float, sooner: asyncio.Event | None = None) -> None:
    """Wait until the next multiple of `period_s` on the loop's clock, or until `sooner` is set.

    To wake a resting process costs more than most checks do, so checks share their wake-ups if one
    of their periods is a multiple of the other; those of more than a second are whole seconds.
    """
    if period_s > 1:
        period_s = floor(period_s)
    now = asyncio.get_running_loop().time()
    at = (floor((now + EARLY_S) / period_s) + 1) * period_s
    if sooner is None:
        await asyncio.sleep(at - now)
        return
    try:
        async with asyncio.timeout_at(at):
            await sooner.wait()
    except TimeoutError:
        return
