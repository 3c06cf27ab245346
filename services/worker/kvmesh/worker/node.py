"""One worker on the mesh: an engine, its lease, and the worker's subjects on the bus."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from kvmesh.bus.client import Bus, Subscription, returning
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    GENERATE,
    Chunk,
    Cleared,
    CompiledOffer,
    Control,
    ControlReply,
    Dump,
    Instance,
    KvEvent,
    Load,
    MessageDecoder,
    ModelCard,
    StartPhase,
    StartSource,
    StepOutput,
    TakeAdapter,
    Tokens,
    Work,
    WorkReply,
)
from kvmesh.bus.storage.model_files import keep_model, publish_model
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.preparation import patiently
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.bus.ticks import next_tick
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.warnings import Warnings, publish_warnings
from kvmesh.settings.schema import Settings
from kvmesh.worker.capabilities import (
    FollowingEvents,
    HandingDown,
    HandingOff,
    HandoffCounts,
    Retaining,
    TierCounts,
    Tiered,
    sleep_problem,
)
from kvmesh.worker.control import ControlHandler
from kvmesh.worker.engine import (
    Engine,
    EngineConfigError,
    EngineError,
    EngineInfo,
    OutputDelta,
)
from kvmesh.worker.enginecore.counters import LedgerCounts, RetentionState
from kvmesh.worker.health.event_losses import EventLosses
from kvmesh.worker.health.event_silence import EventSilence
from kvmesh.worker.health.load_publisher import LoadPublisher
from kvmesh.worker.health.membership import Membership
from kvmesh.worker.health.rank_digests import RankDigests, digest_reply
from kvmesh.worker.health.stall_watch import StallWatch
from kvmesh.worker.lora.copies import CopyExchange
from kvmesh.worker.lora.folder import configured_folders
from kvmesh.worker.lora.manager import AdapterManager
from kvmesh.worker.model_card import instance_card, model_card
from kvmesh.worker.requests import admission
from kvmesh.worker.requests.handler import RequestHandler
from kvmesh.worker.requests.orphans import OrphanedRequests
from kvmesh.worker.requests.serving_sample import ServingSample
from kvmesh.worker.roles import RoleSwitch, role_problem
from kvmesh.worker.start.before_standby import BeforeStandby
from kvmesh.worker.start.timeline import StartTimeline

log = logging.getLogger(__name__)
EVENT_CHECK_S = 1.0
PUBLISH_S = 5.0
STALL_CHECKS = 10
_work_decoder = MessageDecoder(Work)
_take_decoder = MessageDecoder(TakeAdapter)
_dump_decoder = MessageDecoder(Dump)
_control_decoder: MessageDecoder[Control] = MessageDecoder(Control)


class WorkerNode:
    """Joins the mesh with `start` and leaves it with `drain` and `close`; the engine's `Sink`.

    `on_end` is called when the node should leave: with None on a `Drain` command, with the error
    after the engine has died. Files of adapters travel through the `exchange`, if any. On a `Sleep`
    command it sets `wants_sleep`; the owner then calls `drain_to_sleep`, and `leave`, which keeps
    the engine. `before` are facts of a worker that wakes; `membership` compares its card with
    others; `orphans` are followed for several nodes of a process.
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
        timeline: StartTimeline | None = None,
        exchange: CopyExchange | None = None,
        before: BeforeStandby | None = None,
        membership: Membership | None = None,
        orphans: OrphanedRequests | None = None,
    ) -> None:
        worker = settings.worker
        self._bus = bus
        self._engine = engine
        self._settings = settings
        self._folder = folder
        self._name = name
        self._limits = limits
        self._on_end = on_end
        self._warnings = warnings or Warnings()
        self._timeline = timeline or StartTimeline()
        self._before = before
        self._digests = RankDigests(engine)
        self._membership = membership or Membership(bus, self._warnings, limits.lease_s)
        self._loads = LoadPublisher(bus, instance, worker.load_interval_s, self.load)
        self._requests = RequestHandler(engine, worker, self.load, self._send_chunks, self.output)
        self._adapters = AdapterManager(
            engine,
            worker.engine,
            worker.max_adapters,
            self._requests.live_with,
            self._publish_adapters,
            exchange=exchange,
        )
        self._roles = RoleSwitch(engine, worker.serves, self._publish_role)
        self._control = ControlHandler(
            engine,
            worker.engine,
            self._requests,
            self._adapters,
            self._roles,
            lambda: self._on_end(None),
            self._sleep,
            lambda: self.draining,
        )
        self._orphans = orphans or OrphanedRequests(bus, limits, instance)
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks()
        self._subscriptions: list[Subscription] = []
        self._publisher: KvPublisher | None = None
        self._lease: Lease | None = None
        self._joined = False
        self._failed = False
        self._weights = ""
        self.sources: Callable[[], list[StartSource]] = list  # of what the engine starts with
        self.info: EngineInfo | None = None
        self.instance = instance
        self.draining = False
        self.wants_sleep = asyncio.Event()

    @property
    def ready(self) -> bool:
        """True if routers send requests here."""
        return self._joined and not self.draining and not self._membership.incompatible

    @property
    def model(self) -> ModelCard | None:
        """The card of the model; None before the start."""
        return self._lease.card.model if self._lease is not None else None

    @property
    def events_published(self) -> int:
        """KV events published since the start, of all ranks."""
        return self._publisher.published if self._publisher is not None else 0

    def load(self) -> list[Load]:
        """The load of each rank; empty before the start."""
        return self._engine.load(self.instance) if self.info is not None else []

    def retention(self) -> list[RetentionState]:
        """The retention state of each rank; empty before the start or if the engine has none."""
        engine = self._engine
        return engine.retention() if self.info and isinstance(engine, Retaining) else []

    def tier_counts(self) -> TierCounts | None:
        """Blocks moved between the engine and lower tiers; None if there are no lower tiers."""
        engine = self._engine
        return engine.tier_counts() if self.info and isinstance(engine, Tiered) else None

    def event_counts(self) -> list[LedgerCounts]:
        """The KV events of each rank; empty if the engine tells its blocks otherwise."""
        engine = self._engine
        return engine.event_counts() if self.info and isinstance(engine, FollowingEvents) else []

    def handoff_counts(self) -> HandoffCounts | None:
        """Handoffs with other workers; None if the engine makes none itself."""
        engine = self._engine
        return engine.handoff_counts() if self.info and isinstance(engine, HandingOff) else None

    def watch(self, sample: ServingSample) -> None:
        """Tell `sample` of the requests and their output from now on."""
        self._requests.sample = sample

    def set_weights(self, digest: str) -> None:
        """Put the digest of the weights on the card, now or when the worker joins."""
        self._weights = digest
        if self._joined:
            self._tasks.start(self._publish_weights(), "digest of the weights")

    async def start(self, like: ModelCard | None = None) -> None:
        """Start the engine, then join the mesh; raises EngineError or a bus error.

        `like` is the card of the model if another worker of this process has published it. Routers
        can see the worker once this returns.
        """
        with self._timeline.phase(StartPhase.ENGINE, outer=True):
            self.info = info = await self._engine.start(self)
        self._requests.open(self._settings.worker.devices or info.devices)
        for kind, text in info.warnings.items():
            self._warnings.update(kind, {"": text})
        with self._timeline.phase(StartPhase.REGISTRATION):
            card = await self._make_card(info, like)
            keep_model(self._bus, self._folder, card.model.files if card.model else "")
            await self._membership.admit(card)
            self._start_publishing(card)
            await self._listen()
            await self._orphans.follow(self._requests)
            lease = Lease(self._bus, self._with_phases(card), self._limits, self._on_lapsed)
            self._lease = lease
            await lease.open()
        with self._timeline.phase(StartPhase.ROUTABLE):
            await self._membership.recheck(card)
        vllm = self._settings.vllm if self._settings.worker.engine == "vllm" else None
        folders = configured_folders(vllm.adapters) if vllm is not None else {}
        self._adapters.open(_model_of(card), info.adapters, folders)
        self._roles.open(info)
        await self._publish_card(lease, self._with_phases(lease.card))
        self._joined = True
        await self._publish_weights()
        self._tasks.start(self._membership.run(lambda: self._lease), "membership")
        self._tasks.start(publish_warnings(lambda: self._lease, self._warnings), "warnings")
        self._tasks.start(self._watch_events(card.name, info.block_size), "silence")
        log.info("serving %s on %s as %s", _model_of(card), info.name, self.instance)

    async def drain(self, timeout: float) -> None:
        """Accept nothing new, let running requests end, and abort them after `timeout` seconds.

        Then hand blocks down to lower tiers, for at most `worker.drain_blocks_s` seconds.
        """
        await self._show_draining(True)
        if not await self._requests.drain(timeout):
            left = len(self._requests.live)
            log.warning("%d requests did not end in %g s: aborting them", left, timeout)
        self._requests.abort_all()
        if not self._failed:
            await self._hand_down(self._settings.worker.drain_blocks_s)

    async def drain_to_sleep(self, timeout: float) -> bool:
        """As `drain`; False if requests are left that no other worker can continue.

        The worker then accepts requests again: nothing but its device is at stake.
        """
        await self._show_draining(True)
        if not await self._requests.drain(timeout):
            left, lease = len(self._requests.live), self._lease
            used = [each for each in self._adapters.admitted if self._requests.live_with(each)]
            if lease is None or not await self._membership.others_serve(lease.card, used):
                self.wants_sleep.clear()
                await self._show_draining(False)
                log.warning("not falling asleep: %d requests have no other worker", left)
                return False
            log.info("%d requests move to other workers, since this one falls asleep", left)
        self._requests.abort_all()
        await self._hand_down(self._settings.worker.drain_blocks_s)
        return True

    async def _show_draining(self, draining: bool) -> None:
        self.draining = draining
        if self._lease is not None:
            await self._publish_card(self._lease, replace(self._lease.card, draining=draining))

    def _sleep(self) -> str:
        """Begin to fall asleep; returns the reason if the worker cannot."""
        if self.draining and not self.wants_sleep.is_set():
            return admission.DRAINING.reason
        if not self._joined:
            return "it is starting"
        reason = sleep_problem(self._engine, self._settings.worker.engine)
        if not reason:
            self.wants_sleep.set()
        return reason

    async def _hand_down(self, timeout_s: float) -> None:
        if isinstance(self._engine, HandingDown) and timeout_s:
            left = await self._engine.hand_down(timeout_s)
            if left:
                log.warning("%d blocks did not reach a lower tier in %g s", left, timeout_s)

    async def close(self) -> None:
        """Leave the mesh: withdraw the lease, stop the engine."""
        await self._withdraw()
        await self._engine.close()
        await self._stop_publishing()

    async def leave(self) -> BeforeStandby:
        """Leave the mesh after `drain_to_sleep`, and let the engine run; for the next node."""
        card, publisher = (self._lease.card if self._lease else None), self._publisher
        await self._adapters.leave()
        await self._withdraw()
        self.info, self._joined = None, False
        await self._stop_publishing()
        before, next_events = self._before or BeforeStandby(), dict[int, int]()
        if publisher is not None:
            next_events = before.next_events | publisher.next_events
        if card is None:
            return dataclasses.replace(before, next_events=next_events)
        return BeforeStandby(card.serves, card.model, card.startup_s, card.phases, next_events)

    async def _withdraw(self) -> None:
        if self._lease is not None:
            await self._lease.close()
            self._lease = None
        await self._orphans.forget(self._requests)
        await self._unsubscribe()
        await self._control.close()
        self._requests.close()

    async def _stop_publishing(self) -> None:
        self._loads.close()
        if self._publisher is not None:
            await self._publisher.close()
        await self._tasks.close()

    # joining and leaving

    async def _make_card(self, info: EngineInfo, like: ModelCard | None) -> Instance:
        worker = self._settings.worker
        if reason := role_problem(info, worker.serves):
            raise EngineConfigError(reason)
        if like is None:
            files = await patiently(partial(publish_model, self._bus, self._folder))
            like = model_card(worker, self._folder, info, files)
        model = replace(like, weights=self._weights, adapters=info.adapters)
        sleeps = not sleep_problem(self._engine, worker.engine)
        return instance_card(worker, info, model, self.instance, self._name, sleeps)

    def _with_phases(self, card: Instance) -> Instance:
        now, row = time.monotonic(), self._timeline.row()
        took_s, parked = now - self._timeline.created, self._timeline.parked()
        if parked is not None:
            took_s -= parked.ended - parked.began
        promoted_s = 0.0 if parked is None else now - parked.ended
        if self._before is not None:
            took_s, row = self._before.startup_s, self._before.phases
        return replace(
            card,
            startup_s=took_s,
            phases=row,
            promoted_s=promoted_s,
            adapters=self._adapters.host,
            sources=self.sources(),
        )

    def _start_publishing(self, card: Instance) -> None:
        self._publisher = KvPublisher(
            self._bus,
            self._bus.subjects.kv(_model_of(card), self._name),
            self._name,
            self.instance,
            self._settings.worker.event_interval_s,
            self._engine.dump,
        )
        if self._before is not None:
            for rank, number in self._before.next_events.items():
                self._publisher.skip(rank, number)
                self._publisher.add(rank, [Cleared()])
        self._publisher.start()
        self._loads.start()
        self._tasks.start(self._watch_engine(), "watchdog")

    async def _publish_adapters(self, identities: list[str]) -> None:
        """Put these adapters on the card, and admit requests of the manager's admitted ones."""
        if self.info is None or self._lease is None:
            return
        self.info = replace(self.info, adapters=self._adapters.admitted)
        card = self._lease.card
        model = None if card.model is None else replace(card.model, adapters=identities)
        changed = replace(card, model=model, adapters=self._adapters.host)
        await self._publish_card(self._lease, changed)

    async def _publish_weights(self) -> None:
        lease = self._lease
        if lease is not None and lease.card.model is not None:
            model = replace(lease.card.model, weights=self._weights)
            if model != lease.card.model:
                await self._publish_card(lease, replace(lease.card, model=model))

    async def _publish_role(self, serves: str) -> str:
        """Put what the worker serves on the card; returns the reason if the worker is leaving."""
        if self.draining or self._lease is None:
            return admission.DRAINING.reason
        await self._publish_card(self._lease, replace(self._lease.card, serves=serves))
        return ""

    async def publish_compiled(self, offer: CompiledOffer) -> None:
        """Put the compile cache that the worker offers on the card."""
        if self._lease is not None:
            await self._publish_card(self._lease, replace(self._lease.card, compiled=offer))

    async def _publish_card(self, lease: Lease, card: Instance) -> None:
        try:
            async with asyncio.timeout(PUBLISH_S):
                await lease.update(card)
        except (BusError, TimeoutError) as error:
            log.warning("the next renewal publishes the changed card: %s", cause(error))

    def _on_reconnect(self) -> None:
        self._requests.repeat(self._loop.time())

    def _on_lapsed(self) -> None:
        """Abort requests after the lease has lapsed: frontends have migrated them, or soon will."""
        log.warning("lease lapsed: aborting %d requests", len(self._requests.live))
        self._requests.abort_all()

    async def _unsubscribe(self) -> None:
        if self._on_reconnect in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._on_reconnect)
        while self._subscriptions:
            try:
                await self._subscriptions.pop().unsubscribe()
            except BusError as error:
                log.warning("could not unsubscribe: %s", error)

    # the engine's sink

    def output(self, deltas: list[OutputDelta]) -> None:
        now = self._loop.time()
        if self._requests.output(deltas, now) and self._publisher is not None:
            self._publisher.hurry()
        self._loads.send_with_output(now)

    def events(self, rank: int, events: list[KvEvent]) -> None:
        if self._digests.capture(events):
            return
        if self._publisher is not None:
            self._publisher.add(rank, events)
            self._loads.changed()

    def events_lost(self, rank: int, count: int) -> None:
        if self._publisher is not None:
            self._publisher.skip(rank, count)

    def failed(self, error: EngineError) -> None:
        """End all requests with "abort", so that their frontends migrate them."""
        self.draining = self._failed = True
        self._requests.close()
        live = self._requests.live
        self.output(
            [OutputDelta(request, [], finish="abort", error=str(error)) for request in live]
        )
        self._on_end(error)

    # the worker's subjects

    async def _listen(self) -> None:
        subjects, serve = self._bus.subjects, self._bus.serve
        self._bus.on_reconnect.append(self._on_reconnect)
        self._subscriptions = [
            await serve(
                subjects.work(self.instance),
                _work_decoder,
                returning(self._accept),
                on_malformed=admission.invalid,
            ),
            await serve(
                subjects.ctl(self.instance),
                _control_decoder,
                self._control.handle,
                on_malformed=_malformed,
            ),
            await serve(
                subjects.adapters(self.instance),
                _take_decoder,
                self._control.take,
                on_malformed=_malformed,
            ),
            await serve(
                subjects.dump(self.instance),
                _dump_decoder,
                returning(self._dump),
                on_malformed=_malformed,
            ),
            await answer_pings(self._bus, self.instance),
        ]

    def _accept(self, work: Work) -> WorkReply:
        if self.draining or self.info is None:
            return admission.DRAINING
        if work.adapter is not None:
            if self._adapters.has_yielded(work.adapter):
                return admission.UNLOADED
            self._adapters.used(work.adapter)
        self._loads.changed()
        return self._requests.accept(work, self.info, self._loop.time())

    def _dump(self, request: Dump) -> ControlReply:
        if self.info is None or not 0 <= request.rank < self.info.capacity.dp_ranks:
            return ControlReply(False, f"there is no rank {request.rank}")
        if not request.digest:
            self._engine.dump(request.rank)
            return ControlReply(True)
        blocks = self._digests.blocks(request.rank)
        next_event = self._publisher.next_event(request.rank) if self._publisher else None
        return digest_reply(blocks, next_event, request.listed, self._bus.max_payload)

    def _send_chunks(self, frontend: str, chunks: Sequence[Tokens]) -> None:
        # vectors are too large to share a message
        parts = [[chunk] for chunk in chunks] if self._pools else [chunks]
        for part in parts:
            output = StepOutput(self.instance, cast("list[Chunk]", part))
            self._bus.post(self._bus.subjects.out(frontend), output)

    @property
    def _pools(self) -> bool:
        return self.info is not None and self.info.task != GENERATE

    # health

    async def _watch_engine(self) -> None:
        """Declare an engine dead that has work and takes no step, even if its process lives."""
        timeout = self._settings.worker.hang_timeout_s
        watch = StallWatch(STALL_CHECKS)
        while not watch.stalled:
            await next_tick(timeout / STALL_CHECKS)
            watch.observe(self.load())
        self.failed(EngineError(f"the engine has work but took no step for {timeout:g} s"))

    async def _watch_events(self, name: str, block_size: int) -> None:
        silence, losses = EventSilence(name, block_size), EventLosses(name)
        while self._publisher is not None:
            found = silence.check(self.load(), self._publisher.published_by_rank)
            self._warnings.update("no_kv_events", found)
            dropped = losses.check(self.event_counts(), self._loop.time())
            self._warnings.update("dropped_kv_events", dropped)
            await next_tick(EVENT_CHECK_S)


def _model_of(card: Instance) -> str:
    assert card.model is not None
    return card.model.name


def _malformed(reason: str) -> ControlReply:
    return ControlReply(False, reason)
