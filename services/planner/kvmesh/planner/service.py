"""The planner process: passes the mesh's messages to the planner of each model, and acts."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.discovery.worker_reports import follow_loads, follow_starts
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    FleetAnswer,
    FleetQuestion,
    Instance,
    MessageDecoder,
    Role,
    ScalingDecision,
    Wake,
    encode,
)
from kvmesh.bus.storage.buckets import KnownEntries, keys_reader
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.planner import metrics
from kvmesh.planner.config import plan_options, with_changes
from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.connectors.registry import create_connector
from kvmesh.planner.core.groups.candidates import Plan
from kvmesh.planner.core.groups.role_switches import PlannedSwitch
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.planner.fleet_driver import FleetDriver
from kvmesh.planner.homes import ELSEWHERE, Homes
from kvmesh.planner.idle_models import IdleModels
from kvmesh.planner.leadership import Leadership
from kvmesh.planner.models import ModelPlanners
from kvmesh.planner.oracle_client import OracleClient
from kvmesh.planner.profiles import unfit_profile
from kvmesh.planner.promotions import PromotionDriver
from kvmesh.planner.record import scaling_decision
from kvmesh.planner.role_driver import RoleDriver
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings
from kvmesh.settings.schema import Settings

log = logging.getLogger(__name__)
RECORD_S = 60.0  # an unchanged plan is recorded this often, or twice as seldom if not evaluated
STORE_S = 5.0
REPLAY_S = 30.0
SEQUENCES_S = 300.0
_wakes = MessageDecoder(Wake)
_decisions = MessageDecoder(ScalingDecision)
_changes = msgspec.json.Decoder(dict[str, Any])


@dataclass
class _Changes:
    """The changes that the plans of all models ask for; `refused`: one has to wait."""

    wanted: dict[str, int] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    switching: list[tuple[str, PlannerCore, PlannedSwitch]] = field(default_factory=list)
    sleeping: list[tuple[str, PlannerCore, list[str]]] = field(default_factory=list)
    refused: bool = False


class PlannerService:
    """One planner process. That with the oldest lease decides; the others stand by."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bus = service.bus
        self._settings = service.settings.planner
        options, pools = plan_options(self._settings, service.settings.router)
        connector = create_connector(self._settings, service.bus, pools, service.instance)
        advisory = self._settings.connector == "advisory"
        parked = {pool.name: pool.parked for pool in pools}
        self._driver = FleetDriver(connector, service.warnings, advisory, parked)
        self._promotions = PromotionDriver(service.bus)
        self._observed = False  # the numbers of the place are known, and this planner decides
        self._roles = RoleDriver(service.bus)
        self._homes = Homes(pools)
        self._models = ModelPlanners(options, pools, service.warnings)
        self._latest: dict[str, ScalingDecision] = {}  # by model, of any planner
        self._recorded_at: dict[str, float] = {}
        self._planned: dict[str, dict[str, int]] = {}
        self._failing: set[str] = set()
        self._idle = IdleModels(service.bus, service.instance, service.warnings, lambda: self.leads)
        self._oracle = OracleClient(service.bus, service.warnings)
        self._leadership = Leadership()
        # the numbers that the place runs are another's: this planner has not set them
        self._adopt = True
        self._lease = Lease(
            service.bus, self._card(), service.limits, self._on_lapsed, rejoins=True
        )
        self._directory = Directory(service.bus, service.limits, self._joined, self._left)
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
            await self._oracle.close()
            await self._roles.close()
            await self._promotions.close()
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

    def _joined(self, card: Instance) -> None:
        if card.role is Role.PLANNER and routable(card):
            self._leadership.joined(card)
        elif card.role is Role.PLANNER:
            self._leadership.left(card.instance)
        self._models.joined(card, time.time())
        self._replace(card)

    def _left(self, card: Instance) -> None:
        if card.role is Role.PLANNER:
            self._leadership.left(card.instance)
        self._models.left(card)
        self._replace(card)

    def _replace(self, card: Instance) -> None:
        """Promote a parked worker at once for one that has left or drains, or has just parked."""
        if card.role in (Role.PARKED, Role.WORKER) and self._observed and self.leads:
            self._promote()

    def _on_route(self, message: StreamMessage) -> None:
        self._models.on_route(message, time.time())

    def _on_decision(self, message: StreamMessage) -> None:
        try:
            decision = _decisions.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed decision at %d: %s", message.seq, error)
            return
        self._latest[decision.model] = decision

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
                self._adopt, self._observed = True, False
            elif not self._driver.changing:
                await self._decide_once()

    async def _decide_once(self) -> None:
        if self._adopt and not await self._read_idle():
            return
        self._note_awake()
        self._note_sleepers()
        state = await self._driver.state()
        now = time.time()
        if state is not None:
            self._follow_homes(state)
        changes = _Changes()
        for model, core in list(self._models.cores.items()):
            await self._decide_model(model, core, state, now, changes)
        self._adopt = changes.refused or state is None
        if changes.wanted and state is not None:
            self._execute(changes, state)
        self._observed = state is not None and not self._driver.advisory and not self._adopt
        if self._observed and self.leads:
            self._promote()
            self._drain_surplus(now)

    async def _decide_model(
        self,
        model: str,
        core: PlannerCore,
        state: dict[str, PoolState] | None,
        now: float,
        changes: _Changes,
    ) -> None:
        """Plan one model, record the plan, and add its changes."""
        before = self._observe(model, core, state, now)
        may_be_idle = not self._driver.advisory and all(v.pool.min == 0 for v in core.pools)
        if not self._driver.advisory:
            await self._idle.update(model, may_be_idle, self._models.card(model), now)
        others = (each for each in self._models.cores.values() if each is not core)
        core.devices_elsewhere = sum(each.devices for each in others)
        sleepers = core.sleepers
        plan = self._plan(model, core, now)
        if plan is None:
            return
        self._warn(core, model, now)
        self._ask(core)
        await self._report(model, core, plan, before, now)
        wanted = {pool: n for pool, n in plan.wanted.items() if n != before[pool]}
        if may_be_idle and not any(plan.wanted.values()) and model not in self._idle.listed:
            changes.refused |= bool(wanted)  # without an entry, frontends would forget the model
            core.restore_sleepers(sleepers)  # none is told to sleep
            return
        changes.sleeping.append((model, core, plan.sleep))
        changes.switching += [(model, core, switch) for switch in plan.switches]
        changes.wanted |= wanted
        changes.stop += [name for i in plan.stop if (name := self._models.name(i))]

    def _execute(self, changes: _Changes, state: dict[str, PoolState]) -> None:
        if not self.leads:  # the process may have been frozen meanwhile
            self._adopt = True
            return
        self._note_sleepers()
        self._switch_roles(changes.switching)
        self._have_asleep(changes.sleeping)
        self._start_change(changes.wanted, changes.stop, state)

    def _promote(self) -> None:
        """Promote parked workers in place of those that are wanted and not there."""
        now = time.time()
        for model, core in self._models.cores.items():
            for instance, pool in core.promote(now):
                self._promotions.promote(model, pool, instance, core.promotion_failed)

    def _drain_surplus(self, now: float) -> None:
        for model, core in self._models.cores.items():
            for instance, sleeps in core.surplus(now):
                if sleeps:
                    self._have_asleep([(model, core, [instance])])
                else:
                    self._promotions.drain(instance)

    def _note_sleepers(self) -> None:
        """Tell the driver how many workers of each pool sleep; another planner has recorded it."""
        for model, core in self._models.cores.items():
            latest = self._latest.get(model)
            if self._adopt and latest is not None and latest.planner != self._service.instance:
                core.restore_sleepers({name: plan.asleep for name, plan in latest.pools.items()})
            self._driver.sleepers |= core.sleepers

    def _note_awake(self) -> None:
        """Count workers as serving again that could not fall asleep."""
        for model, core in self._models.cores.items():
            for instance in core.take_awake():
                log.warning("%s serves on: nobody else can continue its requests", instance)
                self._stays_awake(model, core, instance, time.time())

    def _have_asleep(self, sleeping: list[tuple[str, PlannerCore, list[str]]]) -> None:
        for model, core, instances in sleeping:
            for instance in instances:
                pool = core.serving(instance) or ""
                awake = partial(self._stays_awake, model, core)
                core.told_to_sleep(instance)
                self._promotions.sleep(model, pool, instance, awake)

    def _stays_awake(self, model: str, core: PlannerCore, instance: str, now: float) -> None:
        self._recorded_at.pop(model, None)  # so that the next planner knows it too
        core.stays_awake(instance, now)

    def _start_change(
        self, wanted: dict[str, int], stop: list[str], state: dict[str, PoolState]
    ) -> None:
        """Have the place change its numbers, unless changes of roles are all that it takes."""
        if not self._driver.chooses:
            stop = []
        numbers = self._homes.at_place(wanted, stop)
        if numbers and self._driver.chooses:  # those that are starting end before ready ones
            shrinking = [p for p, n in numbers.items() if p in state and n < state[p].wanted]
            stop += self._homes.starting(shrinking, self._stays)
        if numbers:
            self._driver.start_change(numbers, stop)

    def _stays(self, name: str) -> bool:
        """True if a worker serves or is parked: others end first where a pool shrinks."""
        return self._models.instance(name) is not None or self._models.waits(name)

    def _follow_homes(self, state: dict[str, PoolState]) -> None:
        """Let the numbers follow workers that serve as others than those of their place's pool."""
        for core in self._models.cores.values():
            core.switches.able = self._may_switch
        known = {} if self._driver.advisory else state
        for source, target in self._homes.observe(known, self._serving):
            for core in self._models.cores.values():
                core.moved(source, target)

    def _may_switch(self, instance: str) -> bool:
        """True if the place knows a worker: its numbers can then follow the worker's role."""
        return not self._driver.advisory and self._homes.knows(self._models.name(instance) or "")

    def _serving(self, name: str) -> str | None:
        """The pool as which a worker serves, or ELSEWHERE; None if there is no such worker now."""
        instance = self._models.instance(name)
        if instance is None:
            return None
        found = (core.serving(instance) for core in self._models.cores.values())
        return next((pool for pool in found if pool is not None), ELSEWHERE)

    def _switch_roles(self, switching: list[tuple[str, PlannerCore, PlannedSwitch]]) -> None:
        for model, core, switch in switching:
            name = self._models.name(switch.instance) or ""
            self._homes.switched(name, switch.target)
            self._roles.start(model, name, switch, core.switch_failed)

    def _plan(self, model: str, core: PlannerCore, now: float) -> Plan | None:
        """The plan of one model; None, with a warning, if its planner fails: others go on."""
        failed = {}
        plan = None
        try:
            plan = core.decide(now)
        except Exception as error:
            failed = {"": f"{model} is not planned: {type(error).__name__}: {error}"}
            if model not in self._failing:
                log.exception("the planner of %s failed", model)
        (self._failing.add if failed else self._failing.discard)(model)
        self._service.warnings.update(f"plan {model}", failed)
        return plan

    def _ask(self, core: PlannerCore) -> None:
        """Have an oracle simulate the fleets that matter to a model, if one is free."""
        if self._oracle.ready and (question := core.question) is not None:
            self._oracle.ask(question, partial(self._answered, core))

    def _answered(self, core: PlannerCore, question: FleetQuestion, answer: FleetAnswer) -> None:
        core.answered(question, answer, time.time())

    async def _read_idle(self) -> bool:
        """Read the entries of the planner that led before; False, with a warning, on an error."""
        failed = {}
        try:
            await self._idle.read()
        except BusError as error:
            failed = {"": f"cannot read the plan bucket: {cause(error)}"}
        self._service.warnings.update("plan_bucket", failed)
        return not failed

    def _observe(
        self, model: str, core: PlannerCore, state: dict[str, PoolState] | None, now: float
    ) -> dict[str, int]:
        """Take over the numbers that the place keeps running; returns them.

        Without them, as with the advisory connector, the workers present count.
        """
        numbers = self._homes.as_served() if state is not None else {}
        if self._driver.advisory or self._adopt or self._driver.failed or state is None:
            for view in core.pools:
                present = len(view.ready if self._driver.advisory else view.cards)
                view.assume(numbers.get(view.pool.name, present), now)
            if self._adopt:
                latest = self._latest.get(model)
                core.resumed(now, latest.pools if latest is not None else {})
        else:
            for pool in core.observe_wanted(numbers, now):
                self._recorded_at.pop(model, None)  # so that the next planner respects it too
                log.info(
                    "pool %s was set to %d by hand; it stays so for %g s",
                    pool, numbers[pool], core.options.manual_hold_s,
                )  # fmt: skip
        return {view.pool.name: view.wanted for view in core.pools}

    async def _report(
        self, model: str, core: PlannerCore, plan: Plan, before: dict[str, int], now: float
    ) -> None:
        """Record a plan. A change that repeats the last plan is a new attempt, no new decision."""
        changed = plan.wanted not in (before, self._planned.get(model))
        self._planned[model] = plan.wanted
        record = msgspec.structs.replace(
            scaling_decision(core, plan, before, model, self._service.instance, now),
            connector=self._settings.connector,
            changed=changed,
        )
        metrics.observe(record)
        if changed:
            log.info("%s: %s", model, plan.reason)
        # evaluations are rarer than decisions: a record waits for one, to show its candidates
        wait_s = RECORD_S if plan.candidates else 2 * RECORD_S
        if changed or now - self._recorded_at.get(model, 0.0) >= wait_s:
            self._recorded_at[model] = now
            await self._record(record)

    def _warn(self, core: PlannerCore, model: str, now: float) -> None:
        unreachable = {
            promise: f"{model}: even an idle worker cannot keep {promise}; it is kept as well as"
            " possible"
            for promise in core.unreachable
        }
        self._service.warnings.update(f"promise {model}", unreachable)
        failed = {
            view.pool.name: f"workers of pool {view.pool.name} do not become ready: none is started"
            " there for half an hour"
            for view in core.pools
            if view.starts.blocked(core.time(now))
        }
        self._service.warnings.update(f"starts {model}", failed)
        unfit = {view.pool.name: text for view in core.pools if (text := unfit_profile(view))}
        self._service.warnings.update(f"profile {model}", unfit)

    async def _record(self, record: ScalingDecision) -> None:
        subject = self._bus.subjects.scaling(record.model)
        try:
            await self._bus.store(subject, encode(record), STORE_S)
        except BusError as error:
            log.warning("could not record a decision: %s", cause(error))


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
