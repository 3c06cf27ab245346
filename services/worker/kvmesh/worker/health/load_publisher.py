"""Publishes the load of each rank, with output where possible and on its own otherwise."""

import asyncio
from collections.abc import Callable
from math import ceil

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Load

HEARTBEAT_S = 1.0
STEADY_INTERVALS = 3
WITH_OUTPUT_AFTER = 0.75  # of the interval


class LoadPublisher:
    """Publishes the result of `load` at most every `interval_s` seconds while it changes.

    It is read each interval while a rank has requests, since an engine may make progress without
    output, otherwise after a call of `changed` and at each multiple of HEARTBEAT_S on the loop's
    clock, when an unchanged one is repeated: so the workers of a machine that rest wake their
    readers together. Sending it along with output saves a wakeup of the process. While a rank only
    decodes, every third load is published: each one wakes all routers and indexers.
    """

    def __init__(
        self,
        bus: Bus,
        instance: str,
        interval_s: float,
        load: Callable[[], list[Load]],
    ) -> None:
        self._bus = bus
        self._subject = bus.subjects.load(instance)
        self._interval_s = interval_s
        self._load = load
        self._last: list[Load] = []
        self._published_at = 0.0
        self._sent_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # of the timer

    def start(self) -> None:
        """Publish until `close`."""
        self._sent_at = self._loop.time()
        self._arm(self._interval_s)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_with_output(self, now: float) -> None:
        """Publish the load if the next one is nearly due."""
        if now - self._sent_at > WITH_OUTPUT_AFTER * self._interval_s:
            self._send(now)
        self.changed()

    def changed(self) -> None:
        """The load may have changed: publish it once the next one is due."""
        if self._timer is not None and self._due_at > self._sent_at + self._interval_s:
            self._arm(self._interval_s)

    def _arm(self, seconds: float) -> None:
        """Look at the load so many seconds after the last one, or at the next heartbeat."""
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = self._sent_at + seconds
        if seconds == HEARTBEAT_S:
            self._due_at = ceil(self._sent_at / HEARTBEAT_S + 0.5) * HEARTBEAT_S
        self._timer = self._loop.call_at(self._due_at, self._on_time)

    def _on_time(self) -> None:
        self._send(self._loop.time())

    def _send(self, now: float) -> None:
        self._sent_at = now
        loads = self._load()
        if self._timer is not None:
            busy = loads != self._last or any(load.running or load.waiting for load in loads)
            self._arm(self._interval_s if busy else HEARTBEAT_S)
        if now - self._published_at < self._due_after(loads):
            return
        self._last, self._published_at = loads, now
        for load in loads:
            self._bus.post(self._subject, load)

    def _due_after(self, loads: list[Load]) -> float:
        """Seconds after the last message at which these loads are due."""
        longest = max(HEARTBEAT_S - self._interval_s, 0.0) / 2
        if loads == self._last:
            return longest
        if [_work(load) for load in loads] == [_work(load) for load in self._last]:
            return min((STEADY_INTERVALS - 0.5) * self._interval_s, longest)
        return 0.0


def _work(load: Load) -> tuple[int, ...]:
    """The counts that decoding alone leaves unchanged."""
    return (
        load.running,
        load.waiting,
        load.prefill_tokens,
        load.requests,
        load.aborted,
        load.preemptions,
        load.total_blocks,
    )
