"""Watches live sequences: silence is probed, holes are filled, progress is reported.

One periodic pass over all sequences instead of a timer for each.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NoResponder, RequestTimeout
from kvmesh.bus.messages import ControlReply, Instance, Resend, SeqProgress
from kvmesh.bus.ping import ping
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.dispatcher import SequenceTask
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.dispatch.work_client import REJOIN_S, WorkClient
from kvmesh.frontend.errors import ApiError, Unavailable

log = logging.getLogger(__name__)
_replies = msgspec.msgpack.Decoder(ControlReply)
TICK_S = 0.25
PAUSE_S = 1.0  # a tick that comes so late says that this process was stopped or stalled
PING_AFTER_S = 1.0
RESEND_AFTER_S = 2.0
RESEND_MOST_S = 15.0
HOLE_S = 0.05
CONTROL_TIMEOUT_S = 1.0
PROGRESS_TOKENS = 64
PROGRESS_S = 60.0


class LivenessMonitor:
    """Owns the set of jobs in flight and decides which need attention.

    While `backlog()` messages of tokens wait to be read, silence is this process's own doing.
    """

    def __init__(
        self,
        bus: Bus,
        offers: WorkClient,
        tracker: SequenceEventPublisher,
        stall_timeout: float,
        backlog: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._offers = offers
        self._tracker = tracker
        self._stall_timeout = stall_timeout
        self._backlog = backlog
        self._jobs: dict[int, SequenceTask] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._pinged: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def add(self, job: SequenceTask) -> None:
        self._jobs[id(job)] = job
        self._idle.clear()

    def remove(self, job: SequenceTask) -> None:
        self._jobs.pop(id(job), None)
        if not self._jobs:
            self._idle.set()

    async def drain(self, timeout: float) -> None:
        """Return once nothing is in flight; what still is after `timeout` seconds fails."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for job in self._jobs.values():
                job.deadline = self._loop.time()
                if job.sequence.instance:
                    job.sequence.fail(Unavailable("The server is stopping."))

    async def run(self) -> None:
        then = self._loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if now - then > PAUSE_S:
                self._resume(now - then)
            else:
                self._tick(now)
            then = now

    def worker_left(self, card: Instance) -> None:
        """Its lease has ended: whatever it still ran goes elsewhere."""
        self._pinged.pop(card.instance, None)
        self._lose(card.instance, "its lease ended")

    def hole(self, sequence: TokenStream) -> None:
        """A chunk is missing; ask for it, unless that was just done."""
        now = self._loop.time()
        if now >= sequence.resend_at:
            sequence.resend_at = now + HOLE_S
            self._start(self._resend(sequence))

    def _resume(self, pause: float) -> None:
        """This process did not run for `pause` seconds: what came meanwhile is still to be read."""
        for _, sequence in self._sequences():
            sequence.heard_at += pause

    def _tick(self, now: float) -> None:
        if self._backlog():
            return
        for model, sequence in self._sequences():
            if sequence.ended.is_set() or not sequence.instance:
                continue
            self._report(model, sequence, now)
            silence = now - sequence.heard_at
            if silence > self._stall_timeout:
                sequence.fail(ApiError("timeout", "The engine has been silent for too long."))
            elif silence > PING_AFTER_S:
                self._probe(sequence, silence, now)

    def _sequences(self) -> list[tuple[str, TokenStream]]:
        """With the model of each."""
        return [(job.model, each) for job in self._jobs.values() for each in job.sequences]

    def _report(self, model: str, sequence: TokenStream, now: float) -> None:
        done = len(sequence.tokens)
        if done - sequence.reported >= PROGRESS_TOKENS or now - sequence.reported_at > PROGRESS_S:
            sequence.reported, sequence.reported_at = done, now
            self._tracker.event(model, SeqProgress(sequence.attempt, done))

    def _probe(self, sequence: TokenStream, silence: float, now: float) -> None:
        if now - self._pinged.get(sequence.instance, 0.0) > PING_AFTER_S:
            self._pinged[sequence.instance] = now
            self._start(self._ping(sequence.instance))
        wait = min(RESEND_AFTER_S * 2**sequence.probes, RESEND_MOST_S)
        if silence > RESEND_AFTER_S and now >= sequence.resend_at:
            sequence.probes += 1
            sequence.resend_at = now + wait
            self._start(self._resend(sequence))

    async def _ping(self, instance: str) -> None:
        try:
            await ping(self._bus, instance, CONTROL_TIMEOUT_S)
        except NoResponder:
            if self._bus.connected_for < REJOIN_S:
                return  # it may be on its way back itself
            self._pinged.pop(instance, None)
            self._lose(instance, "nobody listens on its subjects")
            await self._offers.bury(instance)
        except RequestTimeout:
            self._offers.suspect(instance)

    async def _resend(self, sequence: TokenStream) -> None:
        """Ask for what is missing; a worker that does not know the request has lost it."""
        metrics.resends.inc()
        attempt = sequence.attempt
        command = Resend(attempt, len(sequence.tokens))
        try:
            subject = self._bus.subjects.ctl(sequence.instance)
            reply = await self._bus.request(subject, command, _replies, CONTROL_TIMEOUT_S)
        except (NoResponder, RequestTimeout) as error:
            log.debug("cannot ask for tokens again: %s", error)
            return
        if not reply.ok and sequence.attempt == attempt and not self._backlog():
            sequence.lose(f"it does not know the request: {reply.reason}")

    def _lose(self, instance: str, reason: str) -> None:
        for _, sequence in self._sequences():
            if sequence.instance == instance:
                sequence.lose(reason, "vanished")

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(_guard(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _guard(coroutine: Coroutine[None, None, None]) -> None:
    try:
        await coroutine
    except BusError as error:
        log.debug("a probe failed: %s", error)
