"""Watchdog that aborts a process whose event loop hangs, so that its supervisor restarts it."""

from kvmesh._native import Watchdog
from kvmesh.bus.ticks import next_tick

CHECKS = 10


async def watch_loop(timeout_s: float) -> None:
    """Until cancelled, abort the process if this loop does not run for about `timeout_s`.

    The stacks of all threads go to standard error. A process stopped by SIGSTOP or by a sleeping
    machine does not count as hanging.
    """
    step = timeout_s / CHECKS
    watchdog = Watchdog(step, CHECKS)
    try:
        while True:
            watchdog.tick()
            await next_tick(step / 2)
    finally:
        watchdog.stop()
