"""One worker on the mesh: an engine, its lease, and the subjects on which it works and tells."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Lease
from kvmesh.bus.messages import (
    Cancel,
    Chunk,
    Clear,
    Control,
    ControlReply,
    Drain,
    Dump,
    KvEvent,
    Load,
    Pin,
    Prefetch,
    Release,
    Resend,
    StepOutput,
    Unpin,
    Work,
    WorkReply,
)
from kvmesh.bus.model_files import publish_model
from kvmesh.bus.ping import answer_pings
from kvmesh.bus.publisher import KvPublisher
from kvmesh.bus.streams import StreamLimits
from kvmesh.runtime.warnings import Warnings, keep_told
from kvmesh.settings.schema import Settings
from kvmesh.worker.capabilities.retaining import Retaining, obey, outcomes
from kvmesh.worker.capabilities.tiered import TierCounts, Tiered, prefetch
from kvmesh.worker.constraints.compiler import ConstraintCompiler
from kvmesh.worker.engine import (
    Engine,
    EngineConfigError,
    EngineError,
    EngineInfo,
    OutputDelta,
    Rejected,
)
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.health.event_silence import EventSilence
from kvmesh.worker.health.membership import Membership
from kvmesh.worker.health.stall_watch import StallWatch
from kvmesh.worker.model_card import instance_card, model_card
from kvmesh.worker.requests import admission as intake
from kvmesh.worker.requests.orphans import OrphanedRequests
from kvmesh.worker.requests.output_buffer import OutputBuffer
from kvmesh.worker.requests.prompt_cache import PromptCache

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
SOON = 0.75  # of the interval of loads: from then on one goes with the next tokens
STALL_LOOKS = 10
ABORTED = "the worker is leaving"
_work_decoder = msgspec.msgpack.Decoder(Work)
_dump_decoder = msgspec.msgpack.Decoder(Dump)
_control_decoder: "msgspec.msgpack.Decoder[Control]" = msgspec.msgpack.Decoder(Control)


class WorkerNode:
    """Joins the mesh with `start`, leaves it with `drain` and `close`.

    `on_end` is called when the node should leave: asked to over the bus (None), or because its
    engine has died.
    """

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        settings: Settings,
        folder: Path,
        name: str,
        instance: str,
        limits: StreamLimits,
        on_end: Callable[[EngineError | None], None],
        warnings: Warnings | None = None,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._settings = settings
        self._folder = folder
        self._name = name
        self._limits = limits
        self._on_end = on_end
        self._warnings = warnings or Warnings()
        self._standing = Membership(bus, self._warnings, limits.lease_s)
        self._transcripts = OutputBuffer()
        self._prompts = PromptCache()
        self._compiler = ConstraintCompiler(engine, self._submit, self.output)
        self._orphans = OrphanedRequests(
            bus, limits, instance, lambda: self._transcripts.frontends, self._abandon
        )
        self._load_interval = settings.worker.load_interval_s
        self._told: list[Load] = []
        self._changed_at = 0.0
        self._told_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Subscription] = []
        self._publisher: KvPublisher | None = None
        self._lease: Lease | None = None
        self._joined = False
        self.info: EngineInfo | None = None
        self.instance = instance
        self.draining = False

    @property
    def ready(self) -> bool:
        return self._joined and not self.draining and not self._standing.incompatible

    @property
    def events_published(self) -> int:
        return self._publisher.published if self._publisher is not None else 0

    def load(self) -> list[Load]:
        """The load of each rank; empty before the start."""
        return self._engine.load(self.instance) if self.info is not None else []

    def retention(self) -> list[RetentionState]:
        """What each rank keeps; empty before the start, and for engines that do not know."""
        engine = self._engine
        return engine.retention() if self.info and isinstance(engine, Retaining) else []

    def tier_counts(self) -> TierCounts | None:
        """What has moved between the engine and the tiers below it, if there are any."""
        engine = self._engine
        return engine.tier_counts() if self.info and isinstance(engine, Tiered) else None

    async def start(self, files: str | None = None) -> None:
        """Start the engine, then join; raises EngineError or a bus error.

        `files` is the digest of the model's files if somebody has published them already.
        """
        self.info = await self._engine.start(self)
        serves = self._settings.worker.serves
        if serves != "aggregated" and not self.info.hands_off:
            raise EngineConfigError(
                f"the {self.info.name} engine, so configured, cannot serve {serves}"
            )
        files = files or await publish_model(self._bus, self._folder)
        model = model_card(self._settings.worker, self._folder, self.info, files)
        card = instance_card(self._settings.worker, self.info, model, self.instance, self._name)
        await self._standing.admit(card)
        self._publisher = KvPublisher(
            self._bus,
            self._bus.subjects.kv(model.name, self._name),
            self._name,
            self.instance,
            self._settings.worker.event_interval_s,
            self._engine.dump,
        )
        self._publisher.start()
        self._tasks = [
            asyncio.create_task(self._send_load(), name="load"),
            asyncio.create_task(self._watch_engine(), name="watchdog"),
        ]
        await self._listen()
        await self._orphans.open()
        self._lease = Lease(self._bus, card, self._limits, self._on_lapsed)
        await self._lease.open()
        await self._standing.recheck(card)
        self._joined = True
        self._tasks += [
            asyncio.create_task(self._standing.run(lambda: self._lease), name="standing"),
            asyncio.create_task(keep_told(lambda: self._lease, self._warnings), name="warnings"),
            asyncio.create_task(self._watch_events(card.name, model.block_size), name="silence"),
        ]
        log.info("serving %s on %s as %s", model.name, self.info.name, self.instance)

    async def drain(self, timeout: float) -> None:
        """Take nothing new and let running requests end; after `timeout` seconds abort them."""
        self.draining = True
        if self._lease is not None:
            await self._lease.update(replace(self._lease.card, draining=True))
        try:
            async with asyncio.timeout(timeout):
                await self._compiler.drain()
                await self._engine.drain()
        except TimeoutError:
            left = self._transcripts.live
            log.warning("%d requests did not end in %g s: aborting them", len(left), timeout)
        self._abort_all(self._transcripts.live)

    async def close(self) -> None:
        """Leave the mesh: withdraw the lease, stop the engine."""
        if self._lease is not None:
            await self._lease.close()
            self._lease = None
        await self._orphans.close()
        await self._unsubscribe()
        self._compiler.close()
        await self._engine.close()
        if self._publisher is not None:
            await self._publisher.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _unsubscribe(self) -> None:
        while self._subscriptions:
            try:
                await self._subscriptions.pop().unsubscribe()
            except NatsError as error:
                log.warning("could not unsubscribe: %s", error)

    # what the engine tells

    def output(self, deltas: list[OutputDelta]) -> None:
        now = asyncio.get_running_loop().time()
        for frontend, chunks in self._transcripts.add(deltas, now).items():
            self._tell_frontend(frontend, chunks)
        if now - self._told_at > SOON * self._load_interval:
            self._tell_load(now)  # with the tokens, it wakes nobody by itself

    def events(self, rank: int, events: list[KvEvent]) -> None:
        if self._publisher is not None:
            self._publisher.add(rank, events)

    def lost(self, rank: int, count: int) -> None:
        if self._publisher is not None:
            self._publisher.skip(rank, count)

    def failed(self, error: EngineError) -> None:
        """Requests get an end that tells their frontends to move them elsewhere."""
        self.draining = True
        self._compiler.close()
        live = self._transcripts.live
        self.output(
            [OutputDelta(request, [], finish="abort", error=str(error)) for request in live]
        )
        self._on_end(error)

    # what the mesh asks

    async def _listen(self) -> None:
        subjects, answer = self._bus.subjects, self._bus.answer
        self._subscriptions = [
            await answer(subjects.work(self.instance), _work_decoder, self._take, intake.invalid),
            await answer(subjects.ctl(self.instance), _control_decoder, self._obey, _unknown),
            await answer(subjects.dump(self.instance), _dump_decoder, self._dump, _unknown),
            await answer_pings(self._bus, self.instance),
        ]

    def _take(self, offered: Work) -> WorkReply:
        if self.draining or self.info is None:
            return intake.DRAINING
        if offered.request in self._transcripts:
            return intake.ACCEPTED
        work = self._prompts.complete(offered)
        if work is None:
            return intake.INCOMPLETE
        if reason := intake.rejection_reason(
            work, self.info, self._settings.worker.constraint_bytes
        ):
            return intake.invalid(reason)
        compiles = self._compiler.must_compile(work)
        if self._full(work.rank) or (compiles and not self._compiler.has_capacity(work)):
            return intake.BUSY
        self._transcripts.start(work, *outcomes(self._engine, work, self.info.retention))
        if compiles:
            self._compiler.start(work)
            return intake.CHECKING
        if reason := self._submit(work):
            self._transcripts.drop(work.request)
            return intake.invalid(reason)
        return intake.STORED if self._prompts.store(work, offered.base) else intake.ACCEPTED

    def _submit(self, work: Work) -> str:
        """Why the engine does not take it; empty if it does."""
        try:
            self._engine.submit(work)
        except Rejected as rejected:
            return rejected.reason
        except Exception:
            # a defect of the engine; elsewhere the same request would meet it again
            log.exception("the engine failed to take request %s", work.request)
            return "the engine failed on it; its worker has logged why"
        return ""

    def _abandon(self, frontend: str) -> None:
        """Nobody reads what is made for this frontend."""
        self._abort_all(self._transcripts.live_of(frontend))
        self._transcripts.drop_frontend(frontend)

    def _on_lapsed(self) -> None:
        """What ran here was moved elsewhere while this process stood still, or soon will be."""
        live = self._transcripts.live
        log.warning("%d requests are aborted: they go on elsewhere", len(live))
        self._abort_all(live)

    def _abort_all(self, requests: list[str]) -> None:
        for request in requests:
            self._abort(request)

    def _abort(self, request: str) -> bool:
        return self._compiler.abort(request) or self._engine.abort(request)

    def _full(self, rank: int) -> bool:
        most = self._settings.worker.max_waiting
        if self._transcripts.live_count < most:
            return False
        return any(load.rank == rank and load.waiting >= most for load in self.load())

    def _obey(self, command: Control) -> ControlReply:
        match command:
            case Cancel(request):
                return _known(self._abort(request))
            case Resend(request, offset):
                return _known(self._resend(request, offset))
            case Clear() | Release() | Pin() | Unpin():
                return obey(self._engine, self._settings.worker.engine, command)
            case Prefetch():
                return prefetch(self._engine, self._settings.worker.engine, command)
            case Drain():
                self._on_end(None)
        return ControlReply(True)

    def _resend(self, request: str, offset: int) -> bool:
        found = self._transcripts.output_from(request, offset)
        if found is not None:
            self._tell_frontend(found[0], [found[1]])
        return found is not None

    def _dump(self, asked: Dump) -> ControlReply:
        if self.info is None or not 0 <= asked.rank < self.info.capacity.dp_ranks:
            return ControlReply(False, f"there is no rank {asked.rank}")
        self._engine.dump(asked.rank)
        return ControlReply(True)

    # what goes out

    def _tell_frontend(self, frontend: str, chunks: list[Chunk]) -> None:
        self._bus.post(self._bus.subjects.out(frontend), StepOutput(self.instance, chunks))

    def _tell_load(self, now: float) -> None:
        """Unless it is what was told last, and that not long ago."""
        self._told_at = now
        loads = self.load()
        if loads == self._told and now - self._changed_at < HEARTBEAT_S:
            return
        self._told, self._changed_at = loads, now
        for load in loads:
            self._bus.post(self._bus.subjects.load(self.instance), load)

    async def _send_load(self) -> None:
        """Tell it when no tokens took it along."""
        clock = asyncio.get_running_loop().time
        self._told_at = clock()
        while True:
            left = self._told_at + self._load_interval - clock()
            if left <= 0:
                self._tell_load(clock())
                left = self._load_interval
            await asyncio.sleep(left)

    async def _watch_engine(self) -> None:
        """An engine that has work and takes no step is dead, even if its process is not."""
        timeout = self._settings.worker.hang_timeout_s
        watch = StallWatch(STALL_LOOKS)
        while not watch.stalled:
            await asyncio.sleep(timeout / STALL_LOOKS)
            watch.observe(self.load())
        self.failed(EngineError(f"the engine has work but took no step for {timeout:g} s"))

    async def _watch_events(self, name: str, block_size: int) -> None:
        silence = EventSilence(name, block_size)
        while self._publisher is not None:
            found = silence.check(self.load(), self._publisher.published_by_rank)
            self._warnings.update("no_kv_events", found)
            await asyncio.sleep(HEARTBEAT_S)


def _unknown(reason: str) -> ControlReply:
    return ControlReply(False, reason)


def _known(known: bool) -> ControlReply:
    return ControlReply(known, "" if known else "no such request here")
