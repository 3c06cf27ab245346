"""Publishes the load of each rank, with output where possible and on its own otherwise."""

import asyncio
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Load

HEARTBEAT_S = 1.0
WITH_OUTPUT_AFTER = 0.75  # of the interval


class LoadPublisher:
    """Publishes the result of `load` every `interval_s` seconds.

    An unchanged load is repeated once per HEARTBEAT_S. Sending it along with output saves a wakeup
    of the process.
    """

    def __init__(
        self, bus: Bus, instance: str, interval_s: float, load: Callable[[], list[Load]]
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._interval_s = interval_s
        self._load = load
        self._last: list[Load] = []
        self._changed_at = 0.0
        self._sent_at = 0.0

    def send_with_output(self, now: float) -> None:
        """Publish the load if the next one is nearly due."""
        if now - self._sent_at > WITH_OUTPUT_AFTER * self._interval_s:
            self._send(now)

    async def run(self) -> None:
        """Publish until cancelled whenever no output has carried the load for an interval."""
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        while True:
            left = self._sent_at + self._interval_s - clock()
            if left <= 0:
                self._send(clock())
                left = self._interval_s
            await asyncio.sleep(left)

    def _send(self, now: float) -> None:
        self._sent_at = now
        loads = self._load()
        if loads == self._last and now - self._changed_at < HEARTBEAT_S:
            return
        self._last, self._changed_at = loads, now
        for load in loads:
            self._bus.post(self._bus.subjects.load(self._instance), load)
