"""Executes batches: each by one frontend, until another one takes it over."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from msgspec.structs import replace

from kvmesh.bus.errors import BusError, Conflict, NotFound, StorageFull, cause
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import Usage
from kvmesh.frontend.batches import batch as states
from kvmesh.frontend.batches.batch import LineFault, StoredBatch
from kvmesh.frontend.batches.forms import LineResult, rest_line, result_line
from kvmesh.frontend.batches.lines import LineBody, check, decoded, spans
from kvmesh.frontend.batches.progress import BatchProgress
from kvmesh.frontend.batches.spool import Spool
from kvmesh.frontend.batches.store import RESULTS, BatchStore, LineRecord, described
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.fair_slots import FairSlots

log = logging.getLogger(__name__)
LOOK_S = 60.0  # between two looks for batches whose frontend is gone
READY_S = 0.5
WAITING = 64  # requests that wait for their placement: more would only lengthen the router's queue
STORE_S, MAX_STORE_S = 1.0, 30.0  # between two records: a hundredth of the batch's age
RETRY_S = 2.0
FULL_S = 30.0  # between two attempts to store results where there is no room
LEAVE_S = 2.0
MAX_UNSTORED = 8 << 20  # bytes of results, from which no request ends before they are stored


class LineDelayed(Exception):
    """A request cannot be served now; it may be in `wait_s` seconds.

    `pauses`: until then, no other request of its batch can be either.
    """

    def __init__(self, wait_s: float = 0.0, pauses: bool = False) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s
        self.pauses = pauses


Execute = Callable[[StoredBatch, LineBody, Callable[[], None]], Awaitable[LineResult]]


async def _not_yet(*_: object) -> LineResult:
    raise LineDelayed


@dataclass
class BatchEnvironment:
    """The frontend as its batches see it.

    `served` tells which of some models are served now. `execute` answers a request, calls the
    function that it gets once the request is placed, and raises LineDelayed.
    """

    instance: str
    store: BatchStore
    threads: FairThreads
    served: Callable[[set[str]], list[str]]
    running: FairSlots
    waiting: FairSlots
    execute: Execute = _not_yet


class BatchRunner:
    """The batches that this frontend executes, with at most `in_flight` requests at once.

    `served` tells which of some models are served now, `is_live` whether a frontend is, by its
    instance, and `is_ready` whether this one can serve requests.
    """

    def __init__(
        self,
        instance: str,
        store: BatchStore,
        threads: FairThreads,
        in_flight: int,
        served: Callable[[set[str]], list[str]],
        is_live: Callable[[str], bool],
        is_ready: Callable[[], bool],
    ) -> None:
        slots = FairSlots(in_flight), FairSlots(WAITING)
        self._environment = BatchEnvironment(instance, store, threads, served, *slots)
        self._is_live = is_live
        self._is_ready = is_ready
        self._look = asyncio.Event()
        self._look.set()
        self._tasks = BackgroundTasks()
        self._runs: dict[str, _Run] = {}
        self._leaving = False

    @property
    def instance(self) -> str:
        return self._environment.instance

    @property
    def store(self) -> BatchStore:
        return self._environment.store

    def execute_with(self, execute: Execute) -> None:
        """Have requests answered by `execute`, which the HTTP application has."""
        self._environment.execute = execute

    def look(self) -> None:
        """Look for batches whose frontend is gone."""
        self._look.set()

    def start(self, batch: StoredBatch, revision: int) -> None:
        """Execute a batch that this frontend owns."""
        if not self._leaving:
            run = self._runs[batch.id] = _Run(self._environment, batch, revision)
            self._tasks.start(self._guarded(run), f"batch {batch.id}")

    def notice(self, batch_id: str) -> None:
        """Somebody has changed a batch, which may run here."""
        if (run := self._runs.get(batch_id)) is not None:
            run.hurry()

    async def run(self) -> None:
        """Go on with the batches of frontends that are gone, until cancelled."""
        while True:
            while not self._is_ready():
                await asyncio.sleep(READY_S)
            self._look.clear()
            try:
                await self._take_over()
            except BusError as error:
                log.debug("cannot look for batches: %s", cause(error))
            await next_tick(LOOK_S, self._look)
            await asyncio.sleep(random.random())  # then several frontends take some each

    async def stop(self) -> None:
        """Leave all batches to the other frontends, from now on."""
        self._leaving = True
        await self._tasks.close()

    async def _take_over(self) -> None:
        found = await self._environment.store.all_running()
        random.shuffle(found)
        for batch, revision in found:
            own = batch.owner == self._environment.instance
            if self._leaving or batch.id in self._runs or (self._is_live(batch.owner) and not own):
                continue
            taken = replace(batch, owner=self._environment.instance)
            try:
                revision = await self._environment.store.replace(taken, revision)
            except Conflict:
                continue  # another frontend was faster
            log.info("going on with batch %s, whose frontend is gone", batch.id)
            self.start(taken, revision)

    async def _guarded(self, run: "_Run") -> None:
        try:
            with metrics.batches.track_inprogress():
                await run.run()
        except Conflict:
            log.info("batch %s goes on at another frontend, or was deleted", run.batch.id)
            self._look.set()  # unless it was this frontend's own change, whose reply was lost
        finally:
            del self._runs[run.batch.id]


class _Run:
    """The execution of one batch."""

    def __init__(self, environment: BatchEnvironment, batch: StoredBatch, revision: int) -> None:
        self.batch = batch
        self._environment = environment
        self._store = environment.store
        self._revision = revision
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks()
        self._progress = BatchProgress(0, ())
        self._ended = asyncio.Event()  # a request
        self._hurry = asyncio.Event()
        self._unstored: list[LineRecord] = []
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._records = 0
        self._requests = Spool()
        self._lines: list[slice] = []
        self._results = {"succeeded": Spool(), "errored": Spool()}
        if batch.form == "anthropic":
            self._results["errored"] = self._results["succeeded"]

    def hurry(self) -> None:
        """Look at once at what is stored of the batch."""
        self._hurry.set()

    async def run(self) -> None:
        """Execute the batch to its end; raises Conflict if another frontend does."""
        try:
            if await self._patiently(self._begin):
                await self._execute_all()
                await self._patiently(self._finish)
        except StorageFull:
            await self._tasks.close()
            await self._patiently(self._give_up)
        finally:
            await self._tasks.close()
            for spool in (self._requests, *self._results.values()):
                spool.close()

    async def _patiently(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """The result of work, which is tried until the bus permits it.

        Raises StorageFull once the batch is to end and there still is no room for its results.
        """
        failing = False
        while True:
            try:
                return await work()
            except Conflict:
                raise
            except BusError as error:
                if not failing:
                    log.warning("batch %s waits: %s", self.batch.id, cause(error))
                failing = True
                if not isinstance(error, StorageFull):
                    await asyncio.sleep(RETRY_S)
                    continue
                with suppress(BusError):
                    self.batch = states.merged(self.batch, await self._current())
                if states.rest(self.batch, self._store.now) is not None:
                    raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(FULL_S):
                        await self._hurry.wait()
                self._hurry.clear()

    async def _begin(self) -> bool:
        """Read and check the requests, and the results that there are; False if it has ended."""
        batch, now, again = self.batch, self._store.now, self.batch.in_progress_at is not None
        if batch.ended:
            return await self._end(batch)
        self._requests.close()
        self._requests = Spool()
        try:
            await self._store.fill(self._requests, batch.input_file, batch.tenant)
        except NotFound:
            faults = [LineFault("file_not_found", "The file with the requests is gone.")]
            return await self._end(states.rejected(batch, faults, now))
        faults, models = await self._environment.threads.call(batch.tenant, self._checked)
        if faults:
            return await self._end(states.rejected(batch, faults, now))
        served = self._environment.served(models)
        await self._change(states.began(batch, len(self._lines), served, now))
        if again:
            await self._read_records()
        return True

    def _checked(self) -> tuple[list[LineFault], set[str]]:
        if not self._requests.size:
            return check(b"", "", ())
        with self._requests.mapped() as data:
            self._lines = spans(data)
            return check(data, self.batch.endpoint, self._lines)

    async def _read_records(self) -> None:
        """Read the results of the frontends before this one, which can store none from now on."""
        self._records, done = 0, list[int]()
        self.batch = replace(self.batch, counts=states.BatchCounts(total=len(self._lines)))
        for spool in set(self._results.values()):
            spool.clear()
        while True:
            found = await self._store.record(self.batch, self._records)
            if found is None:
                try:
                    await self._store.add_record(self.batch, self._records, [])
                except Conflict:
                    continue  # the frontend before has just stored it
                self._records += 1
                break
            self._records += 1
            for each in found:
                done.append(each.number)
                self._count(each)
        self._progress = BatchProgress(len(self._lines), done)

    async def _execute_all(self) -> None:
        """Execute the requests, and store their results now and then."""
        if not self._records:
            self._progress = BatchProgress(len(self._lines), ())
        work = self._tasks.start(self._start_all(), "requests of a batch", awaited=True)
        try:
            while not work.done() and states.rest(self.batch, self._store.now) is None:
                await self._pause(work)
                await self._patiently(self._sync)
            if work.done():
                work.result()
        except asyncio.CancelledError:
            with suppress(BusError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._sync()
            raise
        await self._tasks.close()
        outcome = states.rest(self.batch, self._store.now)
        if outcome is not None:
            for number in self._progress.rest:
                line = rest_line(self.batch, number, self._line(number).custom_id, outcome)
                self._unstored.append(LineRecord(number, outcome, line))
        await self._patiently(self._sync)

    async def _pause(self, work: "asyncio.Task[None]") -> None:
        """Wait until results are due to be stored, or `work` has ended."""
        now = self._store.now
        age = now - self.batch.created
        wait = min(max(age / 100, STORE_S), MAX_STORE_S, max(self.batch.expires - now, 0.0))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait([work, hurry], timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
        self._hurry.clear()

    async def _start_all(self) -> None:
        """Start each request when there is room for it; return when all have ended."""
        environment, progress, key = self._environment, self._progress, self.batch.tenant
        while not progress.finished:
            number = progress.take(self._loop.time())
            if number is None:
                self._ended.clear()
                due = progress.due
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if due == inf else due):
                        await self._ended.wait()
                continue
            await environment.running.acquire(key)
            try:
                await environment.waiting.acquire(key)
            except BaseException:
                environment.running.release()
                raise
            slots = _Slots(environment)
            task = self._tasks.start(self._execute(number, slots), "request of a batch")
            # not by the task itself: one that is cancelled before its first step runs nothing
            task.add_done_callback(partial(self._release, slots))

    def _release(self, slots: "_Slots", _: "asyncio.Task[None]") -> None:
        slots.release()
        self._ended.set()

    async def _execute(self, number: int, slots: "_Slots") -> None:
        line = self._line(number)
        try:
            result = await self._environment.execute(self.batch, line, slots.placed)
        except LineDelayed as delayed:
            self._progress.again(number, self._loop.time(), delayed.wait_s, delayed.pauses)
        else:
            self._add(number, line, result)
            await self._room.wait()

    def _add(self, number: int, line: LineBody, result: LineResult) -> None:
        if not self._progress.end(number):
            return
        tokens, usage = (0, 0, 0, 0), result.usage
        if usage is not None:
            tokens = usage.prompt, usage.cached, usage.output, usage.reasoning
        text = result_line(self.batch, number, line.custom_id, result)
        self._unstored.append(LineRecord(number, result.outcome, text, tokens))
        self._bytes += len(text)
        metrics.batch_requests.labels(result.outcome).inc()
        if self._bytes > MAX_UNSTORED:
            self._room.clear()
            self._hurry.set()

    def _line(self, number: int) -> LineBody:
        span = self._lines[number]
        return decoded(self._requests.read(span.start, span.stop - span.start))

    async def _sync(self) -> bool:
        """Store the results, then the state of the batch, or read it if that has changed."""
        results = self._unstored[:]
        if not results:
            self.batch = states.merged(self.batch, await self._current())
            return True
        await self._store.add_record(self.batch, self._records, results)
        self._records += 1
        del self._unstored[: len(results)]
        for each in results:
            self._count(each)
        self._bytes = sum(len(each.line) for each in self._unstored)
        self._room.set()
        await self._change(self.batch)
        return True

    def _count(self, record: LineRecord) -> None:
        """Count a result that is stored, and write it to the results."""
        prompt, cached, output, reasoning = record.tokens
        usage = Usage(prompt, cached, 0, output, reasoning)
        counts = self.batch.counts.plus(record.outcome, usage)
        self.batch = replace(self.batch, counts=counts)
        kind = "succeeded" if record.outcome == "succeeded" else "errored"
        self._results[kind].write(record.line + b"\n")

    async def _change(self, batch: StoredBatch) -> None:
        """Replace the batch, or take over that it is to be cancelled."""
        while True:
            try:
                self._revision = await self._store.replace(batch, self._revision)
            except Conflict:
                batch = states.merged(batch, await self._current())
            else:
                self.batch = batch
                return

    async def _current(self) -> StoredBatch:
        """The batch as it is stored; raises Conflict if this frontend is not its owner."""
        try:
            found, revision = await self._store.current(self.batch)
        except NotFound as error:
            raise Conflict("the batch was deleted") from error
        if found.owner != self._environment.instance or found.ended:
            raise Conflict("the batch has another owner")
        self._revision = revision
        return found

    async def _finish(self) -> bool:
        """Store the results, and that the batch has ended."""
        if self.batch.ended:
            return await self._end(self.batch)
        now = self._store.now
        await self._change(states.finalizing(self.batch, now))
        batch = self.batch
        names: dict[str, str | None] = {"succeeded": None, "errored": None}
        if batch.form == "anthropic":
            results = self._results["succeeded"]
            await self._store.put_results(
                described(batch, batch.id, RESULTS, results, now), results
            )
        else:
            for kind, letter in (("succeeded", "o"), ("errored", "e")):
                if (spool := self._results[kind]).size:
                    name = names[kind] = f"file-{batch.id.rpartition('_')[2]}{letter}"
                    file = described(batch, name, "batch_output", spool, now)
                    await self._store.put_results(file, spool)
        return await self._end(
            states.ended(self.batch, names["succeeded"], names["errored"], self._store.now)
        )

    async def _give_up(self) -> bool:
        """End the batch without its results."""
        reason = "The store of files has had no room for the results."
        faults = [LineFault("storage_limit_exceeded", reason)]
        return await self._end(states.rejected(self.batch, faults, self._store.now))

    async def _end(self, batch: StoredBatch) -> bool:
        if not self.batch.ended:
            await self._change(batch)
        await self._store.clean(batch)
        log.info("batch %s has ended: %s", batch.id, batch.status)
        return False


class _Slots:
    """The two slots of a request: of those that wait, until it is placed, and of all."""

    def __init__(self, environment: BatchEnvironment) -> None:
        self._environment = environment
        self._waits = True

    def placed(self) -> None:
        if self._waits:
            self._waits = False
            self._environment.waiting.release()

    def release(self) -> None:
        self.placed()
        self._environment.running.release()
