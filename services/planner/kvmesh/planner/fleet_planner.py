"""The decisions about the fleets of all models: an observation in, actions out; no I/O."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvmesh.bus.messages import (
    Drain,
    Promote,
    ScalingDecision,
    Serve,
    Sleep,
    WorkerState,
)
from kvmesh.planner.actions import (
    Action,
    Decided,
    Observation,
    ScaleFleet,
    Unplanned,
    WorkerCommand,
)
from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.groups.candidates import Plan
from kvmesh.planner.core.groups.role_switches import exchangeable
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.models import ModelPlanners

log = logging.getLogger(__name__)
RECORD_S = 60.0  # an unchanged plan is recorded this often, or twice as seldom if not evaluated
ELSEWHERE = ""  # stands for the pool of a worker that serves as those of none


@dataclass
class PoolAssignment:
    """The place counts a worker in its own pool, its *home*, whatever it serves."""

    pools: Sequence[Pool]
    _numbers: dict[str, int] = field(default_factory=dict)
    _home: dict[str, str] = field(default_factory=dict)
    _served: dict[str, str] = field(default_factory=dict)  # of those that serve elsewhere

    def observe(
        self, place: Mapping[str, PoolState], serving: Callable[[str], str | None]
    ) -> list[tuple[str, str]]:
        """Take over the pools as the place reports them, and the one as which each worker serves.

        `serving` is ELSEWHERE for a worker that serves what no pool does, None for an absent one.
        Returns the source and target of each change that nobody has announced with `switched`: a
        worker that has restarted has its first role again.
        """
        pools = {pool.name: pool for pool in self.pools}
        self._numbers = {pool: state.wanted for pool, state in place.items()}
        self._home = {name: pool for pool, state in place.items() for name in state.workers}
        before, self._served = self._served, {}
        for name, home in self._home.items():
            pool = serving(name)
            if pool in (None, home) or home not in pools:
                continue
            if pool == ELSEWHERE or (pool in pools and exchangeable(pools[pool], pools[home])):
                self._served[name] = pool
        return [
            (before.get(name, home), self._served.get(name, home))
            for name, home in self._home.items()
            if before.get(name) != self._served.get(name)
        ]

    def knows(self, name: str) -> bool:
        """True if the place reports a worker of this name."""
        return name in self._home

    def starting(self, pools: Collection[str], ready: Callable[[str], bool]) -> list[str]:
        """The workers of some pools that are not `ready`, as the place reports them."""
        return [name for name, home in self._home.items() if home in pools and not ready(name)]

    def switched(self, name: str, target: str) -> None:
        """The planner has decided that a worker serves as those of pool `target`."""
        self._served[name] = target
        if target == self._home[name]:
            del self._served[name]

    def at_place(self, wanted: Mapping[str, int], stop: Collection[str]) -> dict[str, int]:
        """The changed numbers to ask the place for, so that `wanted` serve as each pool's.

        `stop` are names of workers that end: each leaves its home.
        """
        numbers = {pool: n - self._moved_in(pool) for pool, n in wanted.items()}
        for name in stop:
            served = self._served.get(name)
            if served in numbers:
                home = self._home[name]
                numbers[home] = numbers.get(home, self._numbers[home]) - 1
                numbers[served] += 1
        return {pool: max(n, 0) for pool, n in numbers.items() if n != self._numbers.get(pool)}

    def as_served(self) -> dict[str, int]:
        """The numbers that the place reports, with each worker in the pool as which it serves."""
        return {pool: n + self._moved_in(pool) for pool, n in self._numbers.items()}

    def _moved_in(self, pool: str) -> int:
        """The workers that a pool has from others, less those that it has given."""
        return sum(
            (served == pool) - (self._home[name] == pool) for name, served in self._served.items()
        )


@dataclass
class _Changes:
    """The changes that the plans of all models ask for; `refused`: one has to wait."""

    wanted: dict[str, int] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    commands: list[WorkerCommand] = field(default_factory=list)
    refused: bool = False


class FleetPlanner:
    """Decides for the `models` about the workers of `pools`.

    `planner` is its instance, by which it tells its own records from those of others. An `advisory`
    one changes nothing. The place `chooses` if it can stop the workers that are named. Its numbers
    count workers that serve and those on standby; everywhere else they count those that serve.
    """

    def __init__(
        self,
        models: ModelPlanners,
        pools: Sequence[Pool],
        planner: str = "",
        advisory: bool = False,
        chooses: bool = True,
    ) -> None:
        self._models = models
        self._parked = {pool.name: pool.parked for pool in pools}
        self._assignment = PoolAssignment(pools)
        self._planner = planner
        self._advisory = advisory
        self._chooses = chooses
        self._latest: dict[str, ScalingDecision] = {}  # by model, of any planner
        self._recorded_at: dict[str, float] = {}
        self._recorded: dict[str, list[tuple[float, int]]] = {}
        self._planned: dict[str, dict[str, int]] = {}
        self._promotes = False  # the numbers of the place are known, and this planner decides
        # the numbers that the place runs are another's: this planner has not set them
        self.takes_over = True

    def stand_by(self) -> None:
        """Another planner decides."""
        self.takes_over, self._promotes = True, False

    def on_decision(self, decision: ScalingDecision) -> None:
        """A planner has recorded a decision."""
        self._latest[decision.model] = decision

    def may_be_idle(self, model: str) -> bool:
        """True if a model may run without workers, so frontends have to know it."""
        return not self._advisory and all(v.pool.min == 0 for v in self._models.cores[model].pools)

    def decide(self, seen: Observation) -> list[Action]:
        """The plan of each model, then the actions that change the fleet."""
        cores = self._models.cores
        for model, core in cores.items():
            latest = self._latest.get(model)
            if self.takes_over and latest is not None and latest.planner != self._planner:
                core.restore_asleep({name: plan.asleep for name, plan in latest.pools.items()})
            core.switches.able = self._may_switch
        if seen.place is not None:
            self._assign(seen.place)
        changes, actions = _Changes(), list[Action]()
        for model, core in list(cores.items()):
            actions += self._decide_model(model, core, seen, changes)
        self.takes_over = changes.refused or seen.place is None
        if changes.wanted and seen.place is not None:
            actions += self._execute(changes, seen.place)
        self._promotes = seen.place is not None and not self._advisory and not self.takes_over
        return [*actions, *self.promote(seen.now), *self._surplus(seen.now)]

    def promote(self, now: float) -> list[WorkerCommand]:
        """Commands to workers on standby to serve in place of those that are wanted and not there.

        They need not wait for the next decision.
        """
        if not self._promotes:
            return []
        return [
            self._command(model, pool, instance, Promote())
            for model, core in self._models.cores.items()
            for instance, pool in core.promote(now)
        ]

    def refused(self, command: WorkerCommand, now: float) -> None:
        """A worker does not execute a command: it counts as it did before."""
        core = self._models.cores[command.model]
        match command.order:
            case Promote():
                core.promotion_failed(command.instance)
            case Sleep():
                core.stays_awake(command.instance, now)
            case Serve():
                core.switch_failed(command.instance, now)

    def _assign(self, place: Mapping[str, PoolState]) -> None:
        """Let the numbers follow workers that serve as others than those of their place's pool."""
        standby = self._standby()
        serving = {
            pool: replace(state, wanted=max(state.wanted - standby.get(pool, 0), 0))
            for pool, state in place.items()
        }
        known = {} if self._advisory else serving
        for source, target in self._assignment.observe(known, self._serves_as):
            for core in self._models.cores.values():
                core.moved(source, target)

    def _standby(self) -> dict[str, int]:
        """The workers that the place runs beside those that serve, by pool."""
        asleep = [core.asleep for core in self._models.cores.values()]
        return {
            pool: parked + sum(each.get(pool, 0) for each in asleep)
            for pool, parked in self._parked.items()
        }

    def _may_switch(self, instance: str) -> bool:
        """True if the place knows a worker: its numbers can then follow the worker's role."""
        return self._assignment.knows(self._models.name(instance))

    def _serves_as(self, name: str) -> str | None:
        """The pool as which a worker serves, or ELSEWHERE; None if there is no such worker now."""
        card = self._models.latest(name)
        if card is None or card.state is WorkerState.STANDBY:
            return None
        found = (core.serving(card.instance) for core in self._models.cores.values())
        return next((pool for pool in found if pool is not None), ELSEWHERE)

    # one model

    def _decide_model(
        self, model: str, core: PlannerCore, seen: Observation, changes: _Changes
    ) -> list[Action]:
        """Plan one model, and add its changes."""
        before = self._observe(model, core, seen)
        others = (each for each in self._models.cores.values() if each is not core)
        core.devices_elsewhere = sum(each.devices for each in others)
        asleep = core.asleep
        try:
            plan = core.decide(seen.now)
        except Exception as error:
            return [Unplanned(model, error)]
        actions: list[Action] = [self._decided(model, core, plan, before, seen.now)]
        wanted = {pool: n for pool, n in plan.wanted.items() if n != before[pool]}
        listed = model in seen.idle_models
        if self.may_be_idle(model) and not any(plan.wanted.values()) and not listed:
            changes.refused |= bool(wanted)  # without an entry, frontends would forget the model
            core.restore_asleep(asleep)  # none is told to sleep
            return actions
        if self._advisory:
            core.restore_asleep(asleep)
        else:
            for switch in plan.switches:
                order = Serve(switch.serves)
                changes.commands.append(self._command(model, switch.target, switch.instance, order))
            changes.commands += [self._sleep(model, core, instance) for instance in plan.sleep]
        changes.wanted |= wanted
        changes.stop += [name for i in plan.stop if (name := self._models.name(i))]
        return actions

    def _observe(self, model: str, core: PlannerCore, seen: Observation) -> dict[str, int]:
        """Take over the numbers that the place keeps running; returns them.

        Without them, as with the advisory connector, the workers present count.
        """
        now, absent = seen.now, self._advisory or seen.place is None
        numbers = self._assignment.as_served() if seen.place is not None else {}
        if absent or self.takes_over or seen.failed:
            for view in core.pools:
                present = len(view.ready if self._advisory else view.cards)
                view.assume(numbers.get(view.pool.name, present), now)
            if self.takes_over:
                latest = self._latest.get(model)
                core.resumed(now, latest.pools if latest is not None else {})
        else:
            for pool in core.observe_wanted(numbers, now):
                log.info(
                    "pool %s was set to %d by hand; it stays so for %g s",
                    pool, numbers[pool], core.options.manual_hold_s,
                )  # fmt: skip
        return {view.pool.name: view.wanted for view in core.pools}

    def _decided(
        self, model: str, core: PlannerCore, plan: Plan, before: dict[str, int], now: float
    ) -> Decided:
        """The plan, with what is told of it. A change that repeats the last plan is no new one."""
        changed = plan.wanted not in (before, self._planned.get(model))
        self._planned[model] = plan.wanted
        # evaluations are rarer than decisions: a record waits for one, to show its candidates
        wait_s = RECORD_S if plan.candidates else 2 * RECORD_S
        # what the next planner has to respect
        kept = [(view.manual_at, view.standby.asleep) for view in core.pools]
        due = changed or kept != self._recorded.get(model)
        due |= now - self._recorded_at.get(model, 0.0) >= wait_s
        if due:
            self._recorded_at[model], self._recorded[model] = now, kept
        return Decided(model, plan, before, changed, due)

    # changes of the fleet

    def _execute(self, changes: _Changes, place: Mapping[str, PoolState]) -> list[Action]:
        """Commands to workers; a change of the place unless changes of roles are all it takes."""
        for command in changes.commands:
            if isinstance(command.order, Serve):
                self._assignment.switched(command.name, command.pool)
        stop = changes.stop if self._chooses else []
        numbers = self._assignment.at_place(changes.wanted, stop)
        if not numbers:
            return [*changes.commands]
        standby = self._standby()
        numbers = {pool: n + standby.get(pool, 0) for pool, n in numbers.items()}
        if self._chooses:  # those that are starting end before ready ones
            shrinking = [p for p, n in numbers.items() if p in place and n < place[p].wanted]
            there = self._models.latest
            stop += self._assignment.starting(shrinking, lambda name: there(name) is not None)
        return [*changes.commands, ScaleFleet(numbers, stop)]

    def _surplus(self, now: float) -> list[WorkerCommand]:
        """Have workers wait that have been too many for a while."""
        if not self._promotes:
            return []
        return [
            self._sleep(model, core, instance)
            if sleeps
            else self._command(model, core.serving(instance) or "", instance, Drain())
            for model, core in self._models.cores.items()
            for instance, sleeps in core.surplus(now)
        ]

    def _sleep(self, model: str, core: PlannerCore, instance: str) -> WorkerCommand:
        core.told_to_sleep(instance)
        return self._command(model, core.serving(instance) or "", instance, Sleep())

    def _command(
        self, model: str, pool: str, instance: str, order: Promote | Sleep | Drain | Serve
    ) -> WorkerCommand:
        return WorkerCommand(model, pool, instance, self._models.name(instance), order)
