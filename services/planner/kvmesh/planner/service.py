"""The planner process: passes the mesh's messages to the planner of each model, and acts."""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.discovery.worker_reports import follow_loads, follow_starts
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    Instance,
    MessageDecoder,
    Role,
    ScalingDecision,
    Wake,
    WorkerState,
    encode,
)
from kvmesh.bus.storage.buckets import KnownEntries, keys_reader
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.planner import metrics
from kvmesh.planner.actions import (
    Action,
    Decided,
    Observation,
    ScaleFleet,
    Unplanned,
    WorkerCommand,
)
from kvmesh.planner.config import plan_options, with_changes
from kvmesh.planner.connectors.registry import create_connector
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.planner.fleet_driver import FleetDriver
from kvmesh.planner.fleet_planner import FleetPlanner
from kvmesh.planner.idle_models import IdleModels
from kvmesh.planner.leadership import Leadership
from kvmesh.planner.models import ModelPlanners
from kvmesh.planner.profiles import unfit_profile
from kvmesh.planner.record import scaling_decision
from kvmesh.planner.worker_commands import WorkerCommands
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings
from kvmesh.settings.schema import Settings

log = logging.getLogger(__name__)
STORE_S = 5.0
REPLAY_S = 30.0
SEQUENCES_S = 300.0
_wakes = MessageDecoder(Wake)
_decisions = MessageDecoder(ScalingDecision)
_changes = msgspec.json.Decoder(dict[str, Any])


class PlannerService:
    """One planner process. That with the oldest lease decides; the others stand by."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bus = service.bus
        self._settings = service.settings.planner
        options, pools = plan_options(self._settings, service.settings.router)
        connector = create_connector(self._settings, service.bus, pools, service.instance)
        self._advisory = self._settings.connector == "advisory"
        self._driver = FleetDriver(connector, service.warnings)
        self._commands = WorkerCommands(service.bus, lambda c: self._fleet.refused(c, time.time()))
        self._models = ModelPlanners(options, pools, service.warnings)
        self._fleet = FleetPlanner(
            self._models,
            pools,
            service.instance,
            advisory=self._advisory,
            chooses=connector.chooses,
        )
        self._failing: dict[str, str] = {}
        self._idle = IdleModels(service.bus, service.instance, service.warnings, lambda: self.leads)
        self._leadership = Leadership()
        self._lease = Lease(
            service.bus, self._card(), service.limits, self._on_lapsed, rejoins=True
        )
        self._directory = Directory(
            service.bus,
            service.limits,
            lambda card: self._on_card(card, card.state),
            lambda card: self._on_card(card, WorkerState.GONE),
        )
        subjects = service.bus.subjects
        since = datetime.now(UTC) - timedelta(seconds=self._settings.window_s)
        self._routes = StreamReader(
            self._bus, subjects.route_stream, subjects.route_all, self._on_route, Start(time=since)
        )
        recent = datetime.now(UTC) - timedelta(seconds=SEQUENCES_S)
        self._sequences = StreamReader(
            self._bus, subjects.seq_stream, subjects.seq_all, self._models.on_sequences,
            Start(time=recent),
        )  # fmt: skip
        self._decisions = StreamReader(
            self._bus, subjects.scaling_stream, subjects.scaling_all, self._on_decision,
            Start(last_per_subject=True),
        )  # fmt: skip
        self._known = KnownEntries(
            service.bus, subjects.plan_bucket, "what planners know", lambda: self.leads
        )
        self._changes = keys_reader(
            self._bus, subjects.plan_bucket, subjects.plan_settings_key, self._on_changes
        )
        self.ready = False

    def _card(self) -> Instance:
        return Instance(
            instance=self._service.instance,
            role=Role.PLANNER,
            name=self._service.name,
            version=VERSION,
            started=time.time(),
            unpacks=True,
        )

    @property
    def leads(self) -> bool:
        """True if this planner decides: no other one that can has an older lease."""
        now = asyncio.get_running_loop().time()
        able = self._lease.held and not self._service.warnings.refused
        return able and self._leadership.leads(self._lease.card, now)

    def _on_lapsed(self) -> None:
        now = asyncio.get_running_loop().time()
        self._leadership.lapsed(now, self._directory.lease_s)

    async def run(self) -> None:
        """Plan until the service is stopped."""
        service = self._service
        http = await serve_metrics(
            service.settings.process,
            self._settings.metrics_port,
            lambda: self.ready,
            service.warnings,
        )
        await self._lease.open()
        try:
            await self._open()
            self.ready = True
            service.spawn(publish_warnings(lambda: self._lease, service.warnings), "warnings")
            service.spawn(self._decide(), "decisions")
            service.start_watchdog()
            await service.stopping.wait()
        finally:
            await self._commands.close()
            await self._driver.close()
            for reader in (self._routes, self._sequences, self._changes, self._decisions):
                await reader.close()
            await self._directory.close()
            await self._lease.close()
            if http is not None:
                await http.cleanup()

    async def _open(self) -> None:
        """Read cards and idle models, replay the traffic of the window, then follow everything."""
        await self._directory.open()
        await self._changes.open()
        await self._decisions.open()
        await answer_pings(self._bus, self._service.instance)
        await self._idle.read()
        for model in self._idle.listed:
            self._models.core(model)
        try:
            async with asyncio.timeout(REPLAY_S):
                await self._changes.caught_up.wait()
                await self._decisions.caught_up.wait()
                await self._routes.open()
                await self._routes.caught_up.wait()
                await self._sequences.open()
                await self._sequences.caught_up.wait()
        except TimeoutError:
            log.warning("planning before the streams are replayed: the replay takes too long")
        await follow_loads(self._bus, self._models.on_load)
        await follow_starts(self._bus, lambda each: self._models.on_starting(each, time.time()))
        await self._bus.subscribe(self._bus.subjects.wake_all, _wakes, self._on_wake)

    # signals

    def _on_card(self, card: Instance, state: WorkerState) -> None:
        """Pass it on; a worker on standby is promoted at once for one that drains or leaves."""
        if card.role is Role.PLANNER and state is not WorkerState.GONE and routable(card):
            self._leadership.joined(card)
        elif card.role is Role.PLANNER:
            self._leadership.left(card.instance)
        now = time.time()
        self._models.on_worker(card, state, now)
        if self.leads:
            for command in self._fleet.promote(now):
                self._commands.start(command)

    def _on_route(self, message: StreamMessage) -> None:
        self._models.on_route(message, time.time())

    def _on_decision(self, message: StreamMessage) -> None:
        try:
            decision = _decisions.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed decision at %d: %s", message.seq, error)
            return
        self._fleet.on_decision(decision)

    def _on_wake(self, wake: Wake) -> None:
        self._models.on_wake(wake, time.time())

    def _on_changes(self, message: StreamMessage) -> None:
        """Apply the settings of `kvmesh plan set`; a deleted entry restores the process's own."""
        self._known.note(self._bus.subjects.plan_settings_key, message.data)
        try:
            changes = _changes.decode(message.data) if message.data else {}
            options, pools = plan_options(
                with_changes(self._settings, changes), self._service.settings.router
            )
            self._models.replace_options(options, pools)
        except (msgspec.MsgspecError, PlannerConfigError) as error:
            self._service.warnings.update("plan_settings", {"": f"ignored what was set: {error}"})
            return
        self._service.warnings.update("plan_settings", {})
        if changes:
            texts = (
                f"{key}={','.join(value) if isinstance(value, list) else value}"
                for key, value in changes.items()
            )
            log.info("set at run time: %s", " ".join(texts))

    # decisions

    async def _decide(self) -> None:
        led: bool | None = None
        while True:
            await asyncio.sleep(self._settings.interval_s)
            leads = self.leads
            if leads is not led:
                log.info("this planner decides" if leads else "this planner stands by")
                led = leads
            metrics.leader.set(leads)
            if not leads:
                self._fleet.stand_by()
            elif not self._driver.changing:
                await self._decide_once()

    async def _decide_once(self) -> None:
        seen = await self._gather()
        if seen is not None:
            await self._execute(self._fleet.decide(seen), seen.now)

    async def _gather(self) -> Observation | None:
        """The facts of the place; None while the idle models of the last planner are unknown."""
        if self._fleet.takes_over and not await self._read_idle():
            return None
        for model in [] if self._advisory else list(self._models.cores):
            may_be_idle, card = self._fleet.may_be_idle(model), self._models.card(model)
            await self._idle.update(model, may_be_idle, card, time.time())
        place = await self._driver.state()
        return Observation(time.time(), place, self._driver.failed, frozenset(self._idle.listed))

    async def _execute(self, actions: list[Action], now: float) -> None:
        """Tell what was decided, then change the fleet, if this planner decides still."""
        self._warn_of_failures([each for each in actions if isinstance(each, Unplanned)])
        decided = [each for each in actions if isinstance(each, Decided)]
        for each in decided:
            self._warn(each.model, now)
        for each, record in [(each, self._record_of(each, now)) for each in decided]:
            metrics.observe(record)
            if each.changed:
                log.info("%s: %s", each.model, each.plan.reason)
            if each.due:
                subject = self._bus.subjects.scaling(record.model)
                try:
                    await self._bus.store(subject, encode(record), STORE_S)
                except BusError as error:
                    log.warning("could not record a decision: %s", cause(error))
        if not self.leads:  # the process may have been frozen meanwhile
            self._fleet.stand_by()
            return
        for action in actions:
            match action:
                case WorkerCommand():
                    self._commands.start(action)
                case ScaleFleet():
                    self._driver.start_change(action)

    def _warn_of_failures(self, failures: list[Unplanned]) -> None:
        for each in failures:
            if each.model not in self._failing:
                log.error("the planner of %s failed", each.model, exc_info=each.error)
        self._failing = {
            each.model: f"{each.model} is not planned: {type(each.error).__name__}: {each.error}"
            for each in failures
        }
        self._service.warnings.update("plan", self._failing)

    def _warn(self, model: str, now: float) -> None:
        core, warnings = self._models.cores[model], self._service.warnings
        unreachable = {
            promise: f"{model}: even an idle worker cannot keep {promise}; it is kept as well as"
            " possible"
            for promise in core.unreachable
        }
        warnings.update(f"promise {model}", unreachable)
        failed = {
            view.pool.name: f"workers of pool {view.pool.name} do not become ready: none is started"
            " there for half an hour"
            for view in core.pools
            if view.starts.blocked(core.time(now))
        }
        warnings.update(f"starts {model}", failed)
        unfit = {view.pool.name: text for view in core.pools if (text := unfit_profile(view))}
        warnings.update(f"profile {model}", unfit)

    def _record_of(self, decided: Decided, now: float) -> ScalingDecision:
        core = self._models.cores[decided.model]
        return scaling_decision(
            core, decided, self._service.instance, now, self._settings.connector
        )

    async def _read_idle(self) -> bool:
        """Read the entries of the planner that led before; False, with a warning, on an error."""
        failed = {}
        try:
            await self._idle.read()
        except BusError as error:
            failed = {"": f"cannot read the plan bucket: {cause(error)}"}
        self._service.warnings.update("plan_bucket", failed)
        return not failed


def check(settings: Settings) -> None:
    """Raise StartError on a bad configuration."""
    try:
        plan_options(settings.planner, settings.router)
    except PlannerConfigError as error:
        raise StartError(str(error), permanent=True) from error


async def main(service: Service) -> None:
    """Run a planner until the service stops; raises StartError if its connector is not usable."""
    try:
        planner = PlannerService(service)
    except PlannerConfigError as error:
        raise StartError(str(error), permanent=True) from error
    await planner.run()
