"""Monitor of live streams: probes silent workers, requests missing tokens, reports progress.

One periodic pass over all streams replaces a timer for each.
"""

import asyncio
import logging
from collections.abc import Coroutine

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.ping import ping
from kvmesh.bus.errors import BusError, NoResponder, RequestTimeout
from kvmesh.bus.messages import ControlReply, Instance, MessageDecoder, Resend, SeqProgress
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient
from kvmesh.frontend.errors import ApiError
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
_replies = MessageDecoder(ControlReply)
TICK_S = 0.25
PAUSE_S = 1.0  # a tick that comes this late means that this process was stopped or stalled
PING_AFTER_S, PING_EVERY_S = 0.5, 1.0
RESEND_AFTER_S = 2.0
MAX_RESEND_S = 15.0
GAP_S = 0.05
CONTROL_TIMEOUT_S = 1.0
PROGRESS_TOKENS = 64
PROGRESS_S = 60.0


class ProbeState:
    """Probes of one stream; only the monitor changes it.

    `received_at` is the stream's value at the last check, `paused` the seconds since then in which
    this process could not read messages. `cut_off`: one of both has reconnected since then, so that
    the last tokens may be lost.
    """

    __slots__ = (
        "cut_off",
        "model",
        "paused",
        "probes",
        "received_at",
        "reported",
        "reported_at",
        "resend_at",
        "stream",
    )

    def __init__(self, model: str, stream: TokenStream, now: float) -> None:
        self.model = model
        self.stream = stream
        self.received_at = stream.received_at
        self.paused = 0.0
        self.cut_off = False
        self.probes = 0
        self.resend_at = 0.0
        self.reported = 0
        self.reported_at = now

    def refresh(self) -> None:
        """Reset the state if the stream has received a message since the last check."""
        if self.received_at != self.stream.received_at:
            self.received_at = self.stream.received_at
            self.paused = 0.0
            self.cut_off = False
            self.probes = 0

    def silence(self, now: float) -> float:
        """Seconds without a message, except pauses of this process."""
        return now - self.received_at - self.paused


class LivenessMonitor:
    """Watches the streams in flight.

    While this process reads late, silence does not count against a worker.
    """

    def __init__(
        self,
        bus: Bus,
        workers: WorkClient,
        events: SequenceEventPublisher,
        stall_timeout: float,
    ) -> None:
        self._bus = bus
        self._workers = workers
        self._events = events
        self.stall_timeout = stall_timeout
        self._watched: dict[TokenStream, ProbeState] = {}
        self._any = asyncio.Event()  # stream to watch
        self._pinged: dict[str, float] = {}
        self._tasks = BackgroundTasks()
        self._loop = asyncio.get_running_loop()
        workers.gone, workers.back = self._on_gone, self._on_reconnect
        bus.on_reconnect.append(self._on_reconnect)

    def watch(self, model: str, stream: TokenStream) -> None:
        if stream not in self._watched:
            self._watched[stream] = ProbeState(model, stream, self._loop.time())
            self._any.set()

    def unwatch(self, stream: TokenStream) -> None:
        self._watched.pop(stream, None)

    async def run(self) -> None:
        """Watch until cancelled."""
        previous = self._loop.time()
        while True:
            if not self._watched:
                self._any.clear()
                await self._any.wait()
                previous = self._loop.time()
            await next_tick(TICK_S)
            now = self._loop.time()
            if now - previous > PAUSE_S or self._bus.promptness.late:
                self._add_pause(now - previous)
            else:
                self._tick(now)
            self._bus.promptness.check()
            previous = now

    def worker_left(self, card: Instance) -> None:
        """The worker's lease has ended: end the attempts on it."""
        self._pinged.pop(card.instance, None)
        self._lose(card.instance, "the worker's lease ended")

    def _on_gone(self, instance: str) -> None:
        self._pinged.pop(instance, None)
        self._lose(instance, "no process listens on its subjects")

    def _on_reconnect(self, instance: str | None = None) -> None:
        """A worker, or this process if None, has reconnected: no later token may reveal a loss."""
        for state in self._watched.values():
            if instance in (None, state.stream.instance):
                state.refresh()
                state.cut_off = True

    def on_gap(self, stream: TokenStream) -> None:
        """Request the missing chunk, unless that was just done."""
        state, now = self._watched.get(stream), self._loop.time()
        if state is not None and now >= state.resend_at:
            state.resend_at = now + GAP_S
            self._start(self._resend(stream))

    def _add_pause(self, seconds: float) -> None:
        """Exclude `seconds` in which this process did not run, or read late."""
        for state in self._watched.values():
            state.refresh()
            state.paused += seconds

    def _tick(self, now: float) -> None:
        for state in list(self._watched.values()):
            stream = state.stream
            if stream.ended.is_set() or not stream.instance:
                continue
            state.refresh()
            self._report(state, now)
            silence = state.silence(now)
            if silence > self.stall_timeout:
                stream.fail(ApiError("timeout", "The engine has been silent for too long."))
            elif state.cut_off and now - self._bus.connected_at > TICK_S:
                state.cut_off = False
                self._start(self._resend(stream))
            elif silence > PING_AFTER_S:
                self._probe(state, silence, now)

    def _report(self, state: ProbeState, now: float) -> None:
        done = len(state.stream.tokens)
        if done - state.reported >= PROGRESS_TOKENS or now - state.reported_at > PROGRESS_S:
            state.reported, state.reported_at = done, now
            self._events.event(state.model, SeqProgress(state.stream.attempt, done))

    def _probe(self, state: ProbeState, silence: float, now: float) -> None:
        instance = state.stream.instance
        if now - self._pinged.get(instance, 0.0) > PING_EVERY_S:
            self._pinged[instance] = now
            self._start(self._ping(instance))
        wait = min(RESEND_AFTER_S * 2**state.probes, MAX_RESEND_S)
        if silence > RESEND_AFTER_S and now >= state.resend_at:
            state.probes += 1
            state.resend_at = now + wait
            self._start(self._resend(state.stream))

    async def _ping(self, instance: str) -> None:
        try:
            await ping(self._bus, instance, CONTROL_TIMEOUT_S, at_once=True)
        except (NoResponder, RequestTimeout):
            self._workers.suspect(instance)

    async def _resend(self, stream: TokenStream) -> None:
        """Request the missing tokens; a worker that does not know the request has lost it."""
        metrics.resends.inc()
        work = stream.work
        command = Resend(work, len(stream.tokens))
        try:
            subject = self._bus.subjects.ctl(stream.instance)
            reply = await self._bus.request(
                subject, command, _replies, CONTROL_TIMEOUT_S, repeats=True
            )
        except (NoResponder, RequestTimeout) as error:
            log.debug("cannot request missing tokens: %s", error)
            return
        if not reply.ok and stream.work == work:
            stream.lose(f"the worker does not know the request: {reply.reason}")

    def _lose(self, instance: str, reason: str) -> None:
        for stream in list(self._watched):
            if stream.instance == instance:
                stream.lose(reason, "vanished")

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        self._tasks.start(_guard(coroutine))


async def _guard(coroutine: Coroutine[None, None, None]) -> None:
    try:
        await coroutine
    except BusError as error:
        log.debug("a probe failed: %s", error)
