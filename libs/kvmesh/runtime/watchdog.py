"""A process whose event loop hangs ends, so that whoever supervises it starts another."""

import asyncio

from kvmesh._native import Watchdog

LOOKS = 10


async def watch_loop(patience_s: float) -> None:
    """Until cancelled: abort the process when this loop has not turned for about `patience_s`.

    The stacks of all threads go to standard error. A process that was stopped, with SIGSTOP or as
    its machine slept, is not taken for one that hangs.
    """
    step = patience_s / LOOKS
    dog = Watchdog(step, LOOKS)
    try:
        while True:
            dog.tick()
            await asyncio.sleep(step / 2)
    finally:
        dog.stop()
