"""`kvmesh up` as the operator of its mesh: it runs the workers that a planner wants.

It reads the wanted fleet from the plan bucket and writes reports there.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.messages import DesiredFleet, MessageDecoder, encode
from kvmesh.bus.storage.buckets import keys_reader
from kvmesh.bus.streams.preparation import patiently
from kvmesh.bus.streams.reader import StreamMessage, StreamReader
from kvmesh.bus.ticks import next_tick
from kvmesh.cli.supervisor.fleet import Fleet
from kvmesh.cli.supervisor.plan import ProcessSpec, first_worker_port, most_workers, worker_groups
from kvmesh.settings import Settings

log = logging.getLogger(__name__)
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 10.0
LOOK_S = 10.0
CLOSE_S = 2.0
_desired = MessageDecoder(DesiredFleet)


class WorkerProcesses(Protocol):
    """Starts and stops processes; `on_retired` runs with the name of one that cannot start."""

    on_retired: Callable[[str], None] | None

    def add(self, spec: ProcessSpec) -> None: ...

    def remove(self, name: str, timeout_s: float, on_end: Callable[[str], None]) -> None: ...


class FleetOperator:
    """Reports the workers of `processes` from `open` on, and changes them from `start` on.

    It does not run a fleet that was wanted before it opened. `note` gets each change, for the log.
    """

    def __init__(
        self, bus: Bus, settings: Settings, processes: WorkerProcesses, note: Callable[[str], None]
    ) -> None:
        groups = worker_groups(settings)
        # workers may serve the role of another pool, so the pools' bounds hold together
        most = dict.fromkeys(
            (group.pool for group in groups), sum(most_workers(settings, each) for each in groups)
        )
        self._fleet = Fleet(groups, first_worker_port(settings), most, os.environ)
        # the worker drains first, and the supervisor's own patience begins after that
        self._stop_s = settings.worker.drain_timeout_s + settings.up.stop_timeout_s
        self._bus = bus
        self._processes = processes
        self._note = note
        self._started = False
        self._wanted: DesiredFleet | None = None
        self._before: DesiredFleet | None = None
        self._changed = asyncio.Event()
        self._reader: StreamReader | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Follow the wanted fleet and report what runs; raises BusError.

        Waits while JetStream does not reply, as when NATS restarts.
        """
        await patiently(self._follow)
        self._changed.set()
        self._reporting = asyncio.create_task(self._report(), name="fleet reports")

    async def _follow(self) -> None:
        subjects = self._bus.subjects
        self._before = await self._present(await self._bucket())
        if self._before is not None:
            self._fleet.pass_over(self._before)
        self._processes.on_retired = self._on_retired
        self._reader = keys_reader(
            self._bus, subjects.plan_bucket, subjects.desired_key, self._receive
        )
        await self._reader.open()

    def start(self) -> None:
        """Run the wanted fleet from now on."""
        self._started = True
        if self._wanted is not None:
            self._apply(self._wanted)

    async def close(self) -> None:
        """Stop following, and delete the report: nobody starts workers any more."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait({self._reporting})
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._reader is not None:
                    await self._reader.close()
                await (await self._bucket()).delete(self._bus.subjects.report_key)
        except (TimeoutError, BusError) as error:
            log.warning("the report of the workers stays in the plan bucket: %s", cause(error))

    async def _bucket(self) -> Bucket:
        return await self._bus.js.key_value(self._bus.subjects.plan_bucket)

    async def _present(self, bucket: Bucket) -> DesiredFleet | None:
        try:
            entry = await bucket.get(self._bus.subjects.desired_key)
            return _desired.decode(entry.value or b"")
        except (NotFound, msgspec.MsgspecError):
            return None

    def _receive(self, message: StreamMessage) -> None:
        if not message.data:  # deleted
            return
        try:
            wanted = _desired.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed wanted fleet: %s", error)
            return
        if wanted == self._before:
            return
        self._wanted = wanted
        if self._started:
            self._apply(wanted)

    def _apply(self, wanted: DesiredFleet) -> None:
        change = self._fleet.apply(wanted)
        for spec in change.start:
            self._processes.add(spec)
        for name in change.stop:
            self._processes.remove(name, self._stop_s, self._on_end)
        by = f" as {wanted.planner} wants" if wanted.planner else ""
        if change.start:
            self._note(f"starting {', '.join(spec.name for spec in change.start)}{by}")
        if change.stop:
            self._note(f"stopping {', '.join(change.stop)}{by}")
        self._changed.set()

    def _on_end(self, name: str) -> None:
        self._fleet.ended(name)
        self._changed.set()

    def _on_retired(self, name: str) -> None:
        if self._fleet.retired(name):
            self._processes.remove(name, self._stop_s, self._on_end)
            self._changed.set()

    async def _report(self) -> None:
        """Write a report after each change, and if the last one is lost, until cancelled."""
        backoff, failing = Backoff(FIRST_DELAY_S, MAX_DELAY_S), False
        key = self._bus.subjects.report_key
        while True:
            await next_tick(LOOK_S, self._changed)
            try:
                bucket = await self._bucket()
                if self._changed.is_set() or not await _exists(bucket, key):
                    self._changed.clear()
                    await bucket.put(key, encode(self._fleet.report()))
            except BusError as error:
                if not failing:
                    log.warning("cannot report the workers, retrying: %s", cause(error))
                failing = True
                self._changed.set()
                await asyncio.sleep(backoff.delay())
            else:
                backoff, failing = Backoff(FIRST_DELAY_S, MAX_DELAY_S), False


async def _exists(bucket: Bucket, key: str) -> bool:
    try:
        return bool((await bucket.get(key)).value)
    except NotFound:
        return False
