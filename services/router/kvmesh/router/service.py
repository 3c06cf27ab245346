"""The router process: passes the mesh's cards, loads and streams to the routers of its models."""

import asyncio
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from math import inf
from time import monotonic

import msgspec
from msgspec.structs import replace

from kvmesh.bus.client import returning
from kvmesh.bus.discovery.changed_settings import ChangedSettingsReader
from kvmesh.bus.discovery.compatibility import Statements
from kvmesh.bus.discovery.directory import READY, Directory
from kvmesh.bus.discovery.leases import STATE, Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.discovery.settled import publish_settled, shown
from kvmesh.bus.discovery.worker_reports import follow_loads
from kvmesh.bus.messages import (
    Instance,
    LearnedReport,
    Load,
    MessageDecoder,
    ModelCard,
    RankSpeed,
    ReturnsReport,
    Role,
    RouteEvent,
    SeqBatch,
    Settled,
    ShowLearned,
    ShowReturns,
    ShowSpeeds,
    SpeedReport,
    Thresholds,
    ToolEvent,
)
from kvmesh.bus.storage.buckets import KnownEntries, keys_reader
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.subjects import untoken
from kvmesh.bus.ticks import next_tick
from kvmesh.prompt_delta.hashes import ReceivedHashes
from kvmesh.router.config import check_settings, thresholds
from kvmesh.router.errors import RouterConfigError
from kvmesh.router.model_router import ModelRouter
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.registry import make_policy
from kvmesh.router.returns_report import returns_report
from kvmesh.router.sequence_feed import SequenceFeed, model_of
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings
from kvmesh.settings import SettingsError
from kvmesh.settings.live import LiveSection
from kvmesh.settings.schema import RouterSettings, Section, Settings

log = logging.getLogger(__name__)
TICK_S, REST_S = 0.1, 1.0  # while a model has requests, otherwise
SWEEP_S = 1.0
RETURNS_HISTORY_S = 900.0  # of the decision stream, from which returns are learned at start
SPEEDS_HISTORY_S = 60.0  # likewise the length of answers
MAX_LEARNERS = 256  # of a report
_NO_INDEX = "no reply from an indexer for %s: its requests are placed without overlaps"
_NOTHING_FOUND = (
    "the index has no overlaps for prompts of %s that begin like earlier ones: KV events are lost,"
    " disabled, or hashed with another block size or salt"
)
_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
_questions: MessageDecoder[ShowLearned | ShowReturns | ShowSpeeds] = MessageDecoder(
    ShowLearned | ShowReturns | ShowSpeeds
)
_thresholds = MessageDecoder(Thresholds)
_tools = MessageDecoder(ToolEvent)


class RouterService:
    """The models of one router process; with `serves` false it serves no requests (embedded)."""

    def __init__(self, service: Service, serves: bool = True) -> None:
        self._service = service
        self._serves = serves
        self._models: dict[str, ModelRouter] = {}
        self._model_of: dict[str, str] = {}
        self._kvbms: dict[str, Instance] = {}
        self._indexers: dict[str, Instance] = {}
        self._prompts = ReceivedHashes()
        self._statements = Statements(own=service.instance)
        self._routers: set[str] = set()
        self._limits: dict[str, Thresholds] = {}  # those that `kvmesh model busy` has set
        self._joined_model = asyncio.Event()
        self._active = asyncio.Event()  # a request has come, or gone, since the last rest
        self.ready = False
        bus, subjects = service.bus, service.bus.subjects
        self._directory = Directory(bus, service.limits, self._joined, self._left)
        self._sequences = SequenceFeed(bus, service.instance, self._on_sequences)
        bucket = subjects.router_bucket
        self._busy_prefix = f"$KV.{bucket}.{subjects.busy_key('')}"
        self._known_limits = KnownEntries(
            bus, bucket, "busy thresholds", lambda: self.ready and serves
        )
        self._busy = keys_reader(bus, bucket, f"{subjects.busy_key('')}>", self._on_thresholds)
        self._changed_settings = ChangedSettingsReader(
            bus,
            "router",
            LiveSection("router", service.settings.router, _check_changed),
            self._take_settings,
            lambda: self.ready and serves,
        )
        self._policy_since = 0.0
        self._routes = self._route_reader()

    def _route_reader(self) -> StreamReader | None:
        settings, bus = self._service.settings.router, self._service.bus
        policy_s = make_policy(settings.policy, settings).history_s
        self._policy_since = time.time() - policy_s if policy_s else inf
        returns_s = RETURNS_HISTORY_S if settings.forecast_returns else 0.0
        history_s = max(policy_s, returns_s, SPEEDS_HISTORY_S if settings.learn_speeds else 0.0)
        if not history_s:
            return None
        since = datetime.now(UTC) - timedelta(seconds=history_s)
        subjects = bus.subjects
        return StreamReader(
            bus, subjects.route_stream, subjects.route_all, self._on_route, Start(time=since)
        )

    @property
    def _readers(self) -> list[StreamReader]:
        return [r for r in (self._busy, self._sequences.reader, self._routes) if r is not None]

    async def run(self) -> None:
        """Run as a process of the mesh until the service is stopped."""
        service = self._service
        settings = service.settings.router
        runner = await serve_metrics(
            service.settings.process, settings.metrics_port, lambda: self.ready, service.warnings
        )
        card = Instance(
            instance=service.instance,
            role=Role.ROUTER,
            name=service.name,
            version=VERSION,
            started=time.time(),
            labels={STATE: "catching up"},
            completes_prompts=True,
            unpacks=True,
        )
        lease = Lease(service.bus, card, service.limits)
        await lease.open()
        try:
            await self.open()
            await lease.update(
                replace(card, labels={STATE: READY, **self._changed_settings.labels})
            )
            service.spawn(publish_warnings(lambda: lease, service.warnings), "warnings")
            service.spawn(publish_settled(lease, self._settled), "settled facts")
            service.spawn(self._changed_settings.show(lease), "changed settings")
            service.start_watchdog()
            await service.stopping.wait()
            for router in self._models.values():
                await router.leave()
            await self.close()
        finally:
            await lease.close()
            if runner is not None:
                await runner.cleanup()

    async def open(self) -> None:
        """Read the cards and replay the streams, then serve."""
        await self._changed_settings.open()
        await self._directory.open()
        for model, router in self._models.items():
            router.core.table.adopt(self._statements.of(model))
        for reader in self._readers:
            await reader.open()
        await self._warm_up()
        bus = self._service.bus
        await follow_loads(bus, self._on_load)
        if self._service.settings.router.forecast_returns:
            await bus.subscribe(bus.subjects.tool_all, _tools, self._on_tool)
        self.ready = True
        if self._serves:
            await answer_pings(bus, self._service.instance)
            subject = bus.subjects.ask(self._service.instance)
            await bus.serve(subject, _questions, returning(self._answer))
            for router in list(self._models.values()):
                await router.serve()
        self._service.spawn(self._tick(), "tick")

    async def close(self) -> None:
        for router in self._models.values():
            await router.close()
        await self._sequences.stop()
        await self._changed_settings.close()
        for reader in self._readers:
            await reader.close()
        await self._directory.close()

    async def model(self, name: str, timeout: float) -> ModelRouter:
        """The router of a model once it has a worker; raises TimeoutError after `timeout` s."""
        async with asyncio.timeout(timeout):
            while name not in self._model_of.values():
                self._joined_model.clear()
                await self._joined_model.wait()
        router = self._router(name)
        await router.index.open()
        return router

    async def _warm_up(self) -> None:
        try:
            async with asyncio.timeout(10):
                for reader in self._readers:
                    await reader.caught_up.wait()
        except TimeoutError:
            log.warning("serving before the streams are replayed: the replay takes too long")

    async def _tick(self) -> None:
        swept = monotonic()
        while True:
            await self._until_tick()
            now = monotonic()
            sweep = now - swept > SWEEP_S - TICK_S / 2
            swept = now if sweep else swept
            await self._sequences.check(now)
            for router in list(self._models.values()):
                if sweep:
                    router.sweep(self._routers, now)
                router.tick(now)
            if sweep:
                self._warn()

    async def _until_tick(self) -> None:
        if not any(router.busy for router in self._models.values()):
            self._active.clear()
            await next_tick(REST_S, self._active)
            if not self._active.is_set():
                return
        await next_tick(TICK_S)

    def _warn(self) -> None:
        """Update the warnings about workers and indexers of all models."""
        cores = [router.core for router in self._models.values()]
        incompatible = {i: text for core in cores for i, text in core.table.incompatible.items()}
        texts = {i: f"{text}; it gets no requests" for i, text in incompatible.items()}
        self._service.warnings.update("misfit", texts)
        slow = {key: text for core in cores for key, text in _slow_ranks(core).items()}
        self._service.warnings.update("slow_worker", slow)
        broken = {
            core.model: _NOTHING_FOUND % core.model for core in cores if core.overlap_watch.broken
        }
        self._service.warnings.update("empty_index", broken)
        outages = {m: _NO_INDEX % m for m, r in self._models.items() if r.index.outage}
        self._service.warnings.update("no_index", outages)

    def _settled(self) -> list[Settled]:
        groups = [router.core.table.compatibility for router in self._models.values()]
        for group in groups:
            group.settle()
        return shown(groups)

    def _answer(
        self, question: ShowLearned | ShowReturns | ShowSpeeds
    ) -> LearnedReport | ReturnsReport | SpeedReport:
        if isinstance(question, ShowReturns):
            return returns_report((each.core for each in self._models.values()), monotonic())
        if isinstance(question, ShowLearned):
            learned = (
                router.core.learning.reports(router.model) for router in self._models.values()
            )
            return LearnedReport(list(islice(chain.from_iterable(learned), MAX_LEARNERS)))
        found = [_speeds(router.core) for router in self._models.values()]
        return SpeedReport([speed for speeds in found for speed in speeds])

    def _router(self, model: str) -> ModelRouter:
        router = self._models.get(model)
        if router is None:
            router = self._models[model] = ModelRouter(
                self._service, model, self._prompts, self._directory, self._sequences.post
            )
            router.core.choice.limits = self._limits.get(model, router.core.choice.limits)
            router.core.table.adopt(self._statements.of(model))
            for card in self._kvbms.values():
                router.core.join(card)
            for card in self._indexers.values():
                router.index.joined(card.instance, card.completes_prompts)
        return router

    def _joined(self, card: Instance) -> None:
        self._statements.joined(card)
        if card.role is Role.ROUTER:
            self._routers.add(card.instance)
        elif card.role is Role.INDEXER:
            self._indexer_joined(card)
        elif card.role is Role.KVBM:
            self._kvbms[card.instance] = card
            for router in self._models.values():
                router.core.join(card)
        elif card.role is Role.WORKER and card.model is not None:
            self._worker_joined(card, card.model)

    def _indexer_joined(self, card: Instance) -> None:
        """Add an indexer whose card is labelled ready; remove one whose label has changed."""
        if card.labels.get(STATE) != READY:
            self._indexer_left(card.instance)
            return
        self._indexers[card.instance] = card
        for router in self._models.values():
            router.index.joined(card.instance, card.completes_prompts)

    def _indexer_left(self, instance: str) -> None:
        self._indexers.pop(instance, None)
        for router in self._models.values():
            router.index.left(instance)

    def _worker_joined(self, card: Instance, model: ModelCard) -> None:
        self._model_of[card.instance] = model.name
        router = self._router(model.name)
        router.core.join(card)
        router.schedule_placement()
        self._joined_model.set()
        if self.ready and self._serves:
            self._service.spawn(router.serve(), "serve")

    def _left(self, card: Instance) -> None:
        self._statements.left(card)
        self._routers.discard(card.instance)
        self._indexer_left(card.instance)
        if self._kvbms.pop(card.instance, None) is not None:
            for router in self._models.values():
                router.core.leave(card.instance)
        model = self._model_of.pop(card.instance, None)
        if model is not None:
            self._models[model].core.leave(card.instance)
            self._models[model].schedule_placement()

    def _on_sequences(self, model: str, batch: SeqBatch) -> None:
        router = self._router(model)
        own = batch.source == self._service.instance
        self._active.set()
        for event in batch.events:
            router.apply(event, own)
        router.schedule_placement()

    def _on_route(self, message: StreamMessage) -> None:
        try:
            event = _routes.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed decision at %d: %s", message.seq, error)
            return
        core = self._router(model_of(message.subject)).core
        if message.time >= self._policy_since:
            core.apply_route_event(event, monotonic())
        core.learn(event, monotonic())

    def _on_tool(self, event: ToolEvent) -> None:
        for router in self._models.values():
            router.core.learn(event, monotonic())

    def _on_thresholds(self, message: StreamMessage) -> None:
        model = untoken(message.subject.removeprefix(self._busy_prefix))
        self._known_limits.note(self._service.bus.subjects.busy_key(model), message.data)
        try:
            limits = _thresholds.decode(message.data) if message.data else None
        except msgspec.MsgspecError as error:
            log.warning("ignored malformed busy thresholds of %s: %s", model, error)
            return
        if limits is None:
            self._limits.pop(model, None)
            limits = thresholds(self._service.settings.router)
        else:
            self._limits[model] = limits
        if model in self._models:
            self._models[model].core.choice.limits = limits
        texts = (f"{name} {value:g}" for name, value in msgspec.to_builtins(limits).items())
        log.info("busy thresholds of %s: %s", model, ", ".join(texts) or "none")

    def _take_settings(self) -> None:
        """Hand changed settings to what does not look at them at each use."""
        limits = thresholds(self._service.settings.router)
        for model, router in self._models.items():
            router.core.choice.take_costs()
            if model not in self._limits:
                router.core.choice.limits = limits
            router.schedule_placement()

    def _on_load(self, load: Load) -> None:
        model = self._model_of.get(load.instance)
        if model is not None:
            self._models[model].core.apply_load(load, monotonic())
            self._models[model].schedule_placement()


def _speeds(core: RouterCore) -> Iterator[RankSpeed]:
    for slot, (speed, since) in core.speeds.measured.items():
        instance, _, rank = core.table.ranks[slot]
        yield RankSpeed(
            model=core.model,
            instance=instance,
            rank=rank,
            speed=round(speed, 3),
            since=None if since is None else since + core.epoch,
        )


def _slow_ranks(core: RouterCore) -> dict[str, str]:
    found = {}
    for slot, slowness in core.speeds.outliers.items():
        instance, worker, rank = core.table.ranks[slot]
        if slowness > 1:
            found[f"{instance} {rank}"] = (
                f"{worker} rank {rank} takes {slowness:.0f} times as long as the others of"
                f" {core.model} for the same work{_since(core, slot)}: it gets fewer requests"
            )
    return found


def _since(core: RouterCore, slot: int) -> str:
    found = core.speeds.measured.get(slot)
    if found is None or found.since is None:
        return ""
    return time.strftime(" since %H:%M", time.localtime(found.since + core.epoch))


def _check_changed(section: Section) -> None:
    if isinstance(section, RouterSettings):
        try:
            check_settings(section)
        except RouterConfigError as error:
            raise SettingsError("router", str(error)) from error


def check(settings: Settings) -> None:
    """Raise StartError on a bad configuration."""
    try:
        check_settings(settings.router)
    except RouterConfigError as error:
        raise StartError(str(error), permanent=True) from error


async def main(service: Service) -> None:
    """Run a router until the service stops."""
    await RouterService(service).run()
