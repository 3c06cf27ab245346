"""The planner of one model: pure, with messages and time passed in.

The live service and the simulator pass the same messages: cards, loads, events of active sequences,
decisions and outcomes. Times are in Unix seconds (virtual ones in the simulator).
"""

from collections.abc import Mapping, Sequence
from math import inf

from kvmesh.bus.messages import (
    Instance,
    Load,
    Outcome,
    PoolPlan,
    RouteEvent,
    SeqEvent,
    WorkerState,
)
from kvmesh.planner.core.batch_work import BatchWork
from kvmesh.planner.core.demand import Demand
from kvmesh.planner.core.groups.candidates import Plan
from kvmesh.planner.core.groups.pool_group import PoolGroup
from kvmesh.planner.core.groups.role_switches import RoleSwitches
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise, promises_of
from kvmesh.planner.core.starts import ReportedStarts
from kvmesh.planner.core.traffic import NewWork, ObservedTraffic
from kvmesh.planner.core.victims import CacheWorth

WAKE_S = 15.0
LATENCY = (Promise("ttft", 0.9, 2.0),)
THROUGHPUT = (Promise("ttft", 0.9, 15.0),)


class PlannerCore:
    """Decides for one model; `pools` are all pools that may serve it."""

    def __init__(self, options: PlanOptions, pools: Sequence[Pool]) -> None:
        self.options = options
        self.traffic = ObservedTraffic(options.window_s)
        self.demand = Demand(options.predictor)
        self.worth = CacheWorth()
        self.switches = RoleSwitches()
        self.batch = BatchWork()
        self.reported = ReportedStarts()
        self.pools = [PoolView(pool, options.startup_s) for pool in pools]
        self.model = ""  # that of the workers
        self._offset = 0.0
        self._began = self._decided_at = self._latest = -inf
        self._busy_at = -inf
        self._woken = -inf, 0
        self._pool_of: dict[str, PoolView] = {}
        self.devices_elsewhere = 0  # devices of other models' workers, which the budget includes
        self.groups = self._grouped()
        self._note_batch_classes()

    def _note_batch_classes(self) -> None:
        """Batch classes that a promise names are planned for as others are."""
        promised = {p.request_class for p in self.options.promises}
        self.batch.classes = self.options.batch_classes - promised

    def _grouped(self) -> list[PoolGroup]:
        groups = [
            PoolGroup(self, [view for view in self.pools if view.pool.serves in serves], serves)
            for serves in (("aggregated", "decode"), ("prefill",))
        ]
        return [group for group in groups if group.views]

    def time(self, now: float) -> float:
        """The time of this core at `now`: it goes on where a clock is set back."""
        return now + self._offset

    # signals

    def joined(self, card: Instance, pool: str, now: float, new: bool = True) -> None:
        """A worker of `pool`, which may have come from another one, is there or has another card.

        One that is not `new` has served other requests before: it is none of those that start.
        """
        if card.state is WorkerState.STANDBY:
            self.model = self.model or card.parked_for
            self._view(pool).standby.joined(card)
            return
        now = self._seen(now)
        if card.model is not None:
            self.model = card.model.name
        switch = self.switches.pending(card.instance)
        if switch is not None and pool == switch.target:
            self.switches.ended(card.instance)
        elif switch is not None and pool == switch.source:
            pool = switch.target
        self._join(card, pool, now, new)

    def _join(self, card: Instance, pool: str, now: float, new: bool = True) -> None:
        view = self._view(pool)
        before = self._pool_of.get(card.instance)
        if before is None:  # a worker that has just come may not leave at once
            self._busy_at = max(self._busy_at, now)
        if before is not None and before is not view:
            before.left(card.instance)
        self._pool_of[card.instance] = view
        view.joined(card, now, begun=before is not None or not new)
        self.traffic.joined(card.instance, now)

    def promote(self, now: float) -> list[tuple[str, str]]:
        """The parked workers to promote now, each with its pool; they count as promoted."""
        now = self._seen(now)
        return [(instance, view.pool.name) for view in self.pools for instance in view.promote(now)]

    def promotion_failed(self, instance: str) -> None:
        """A worker refuses to be promoted, or does not reply: another one is, or it once more."""
        for view in self.pools:
            view.standby.not_promoted(instance)

    def surplus(self, now: float) -> list[tuple[str, bool]]:
        """Ready workers beyond those wanted: each is to sleep if True, else to drain.

        Those that drain are parked again by their place. Where it parks none and they cannot sleep,
        they count as wanted, and may stop.
        """
        now = self._seen(now)
        found: list[tuple[str, bool]] = []
        for view in self.pools:
            for instance in self.worth.least(view.stoppable, now)[: view.surplus(now)]:
                able = view.standby.can_sleep(view.cards[instance], now)
                if able or view.pool.parked:
                    found.append((instance, able))
                else:
                    view.stays_awake(instance, now)
        return found

    @property
    def asleep(self) -> dict[str, int]:
        """The number of workers of each pool that sleep in place of being stopped."""
        return {view.pool.name: view.standby.asleep for view in self.pools}

    def restore_asleep(self, asleep: Mapping[str, int]) -> None:
        """Take over the `asleep` of before, or of another planner, before a place is observed."""
        for view in self.pools:
            view.standby.asleep = min(max(asleep.get(view.pool.name, 0), 0), view.pool.asleep)

    def told_to_sleep(self, instance: str) -> None:
        """A worker is told to sleep, and may serve on."""
        view = self._pool_of.get(instance)
        if view is not None:
            view.standby.tell(instance)

    def stays_awake(self, instance: str, now: float) -> None:
        """A worker that was told to sleep refuses, or does not reply."""
        now = self._seen(now)
        for view in self.pools:
            view.stays_awake(instance, now)

    def _view(self, pool: str) -> PoolView:
        return next(view for view in self.pools if view.pool.name == pool)

    def serving(self, instance: str) -> str | None:
        """The pool as which a worker serves, or is about to; None if the worker is unknown."""
        view = self._pool_of.get(instance)
        return view.pool.name if view is not None else None

    def left(self, instance: str) -> None:
        """A worker has left, or is being promoted: its figures leave all sums with it."""
        self.switches.ended(instance)
        for view in self.pools:
            view.standby.cards.pop(instance, None)
        own = self._pool_of.pop(instance, None)
        if own is not None:
            own.left(instance)
        self.worth.left(instance)
        self.traffic.left(instance)

    def on_load(self, load: Load) -> None:
        view = self._pool_of.get(load.instance)
        if view is not None:
            view.on_load(load)

    def on_sequence(self, event: SeqEvent) -> None:
        if self.batch.on_sequence(event):
            return
        latest = self._latest if self._latest > -inf else inf
        self._count(self.traffic.on_sequence(event, latest))

    def on_route(self, event: RouteEvent, now: float) -> None:
        now = self._seen(now)
        if isinstance(event, Outcome):
            self.worth.served(event, now)
        if self.batch.on_route(event, now):
            self._busy_at = max(self._busy_at, now)
            return
        self._count(self.traffic.on_route(event, self._latest))

    def _seen(self, now: float) -> float:
        now = self.time(now)
        self._latest = max(self._latest, now)
        return now

    def _count(self, arrival: NewWork | None) -> None:
        if arrival is not None:
            self.demand.arrived(arrival.at)
            self._busy_at = max(self._busy_at, arrival.at)

    @property
    def promises(self) -> list[Promise]:
        """The promises that are aimed at; those of the target where none bounds all waits."""
        promises = promises_of(self.options.promises, self.model)
        if any(p.metric != "itl" and not p.request_class for p in promises):
            return promises
        return [*promises, *(LATENCY if self.options.target == "latency" else THROUGHPUT)]

    @property
    def unreachable(self) -> set[str]:
        """The promises that even an idle worker cannot keep."""
        return set().union(*(group.unreachable for group in self.groups))

    def replace_options(self, options: PlanOptions, pools: dict[str, Pool]) -> None:
        """Use other options, and other bounds of the same pools, from the next decision on."""
        self.options = options
        self._note_batch_classes()
        served = [view.pool.serves for view in self.pools]
        for view in self.pools:
            view.pool = pools.get(view.pool.name, view.pool)
        if served != [view.pool.serves for view in self.pools]:
            self.groups = self._grouped()
        for group in self.groups:
            group.evaluate_again()

    def wake(self, waiting: int, now: float) -> None:
        """Requests wait in frontends for a model without workers."""
        self._woken = self._seen(now), waiting

    def requests_without_worker(self, now: float) -> int:
        """Requests that wait in frontends for a worker, as of the last WAKE_S seconds of `time`."""
        at, waiting = self._woken
        return waiting if now - at <= WAKE_S else 0

    def idle(self, now: float) -> bool:
        """True if nothing has arrived for so long that pools shrink to their least size."""
        return self.quiet_s(now) >= self.options.zero_after_s

    def quiet_s(self, now: float) -> float:
        """Seconds since the last request or new worker; 0 while requests wait."""
        if self.traffic.waiting:
            return 0.0
        return now - max(self._busy_at, self._woken[0], self._began)

    def proven(self, now: float) -> bool:
        """True if the load of a whole window is known, however few its requests are."""
        begun = self.demand.series.begun
        return begun is not None and now - begun >= self.options.window_s

    def observe_wanted(self, wanted: dict[str, int], now: float) -> list[str]:
        """Take over the numbers that the place keeps running; returns the pools changed by hand."""
        now = self._seen(now)
        return [
            view.pool.name
            for view in self.pools
            if view.pool.name in wanted and view.observe_wanted(wanted[view.pool.name], now)
        ]

    @property
    def devices(self) -> int:
        """Devices of the wanted workers of all pools."""
        return sum(view.wanted * view.pool.devices for view in self.pools)

    def resumed(self, now: float, recorded: Mapping[str, PoolPlan]) -> None:
        """This planner decides from now on, and goes on from the pools that were recorded last.

        If it does not know when another one made changes, the cool-down begins now.
        """
        now = self.time(now)
        for view in self.pools:
            if view.pool.name in recorded:
                view.remember(recorded[view.pool.name], now)
        for group in self.groups:
            times = [
                recorded[view.pool.name].changed_at
                for view in group.views
                if view.pool.name in recorded
            ]
            group.changed(min(max(times), now) if times else now)

    def moved(self, source: str, target: str) -> None:
        """A worker serves as those of `target`, and this planner has not asked it to.

        Either pool may be none of this model.
        """
        for view in self.pools:
            if view.pool.name in (source, target):
                view.shift(1 if view.pool.name == target else -1)

    def switch_failed(self, instance: str, now: float) -> None:
        """A worker has not changed its role: it counts where it was, and is not asked for a while.

        Its numbers are those of its place, as the next observation shows.
        """
        now = self._seen(now)
        switch = self.switches.failed(instance, now)
        view = self._pool_of.get(instance)
        if switch is None or view is None:
            return
        self._join(view.cards[instance], switch.source, now)
        for group in self.groups:
            group.evaluate_again()

    # decisions

    def decide(self, now: float) -> Plan:
        """The plan for the next interval."""
        now = self._advance(now)
        self.traffic.expire(now)
        self.batch.expire(now)
        self.demand.advance(now)
        reasons: list[str] = []
        for view in self.pools:
            reported = self.reported.count(now - self._offset)
            given_up = view.give_up(now, self.options.manual_hold_s, reported)
            if given_up:
                reasons.append(f"{given_up} of {view.pool.name} never became ready")
        before = {view.pool.name: view.wanted for view in self.pools}
        for instance in self.switches.overdue(now):
            self.switch_failed(instance, now - self._offset)
            reasons.append(f"{instance} did not change its role")
        startup = max(view.lag_s for view in self.pools)
        forecast = self.demand.forecast(startup + self.options.interval_s)
        hold = max(self.options.down_cooldown_s, startup)
        reserve = self.demand.reserved(startup + self.options.interval_s, hold, self.promises)
        if reserve > forecast:
            forecast = reserve
            reasons.append(f"workers are kept for bursts of {reserve:.2g}/s, which return")
        plan = Plan({}, [], "", self.demand.series.level, forecast, [])
        for group in self.groups:
            reasons += group.decide(now, forecast, plan)
        reasons += self._exchange(now, plan)
        reasons += self._fall_asleep(now, plan, before)
        plan.wanted = {view.pool.name: view.wanted for view in self.pools}
        for view in self.pools:
            view.rises.note(view.wanted, now)
        plan.reason = "; ".join(dict.fromkeys(reasons)) or "no change"
        return plan

    def _exchange(self, now: float, plan: Plan) -> list[str]:
        """Let groups that have too few workers take those that others can spare."""
        reasons: list[str] = []
        for group in self.groups:
            for view in group.views:
                missing = group.missing + view.starts.pending
                for other in self.groups:
                    if missing and other is not group:
                        reasons += other.spare(now, missing, view.pool, plan)
            reasons += group.grow_further(now)
        plan.switches = self.switches.exchange(self.pools, plan.stop, now)
        for switch in plan.switches:
            source, target = self._view(switch.source), self._view(switch.target)
            plan.stop.remove(switch.instance)
            target.starts.cancel(1)
            self._join(source.cards[switch.instance], switch.target, now)
            reasons.append(f"a worker of {switch.source} serves {switch.serves}")
        return reasons

    def _fall_asleep(self, now: float, plan: Plan, before: Mapping[str, int]) -> list[str]:
        """Let workers that would stop sleep where their pool may; growing pools wake theirs."""
        for view in self.pools:
            if view.pool.asleep:
                plan.sleep += view.fall_asleep(plan.stop, before[view.pool.name], now)
        plan.stop = [instance for instance in plan.stop if instance not in plan.sleep]
        return [f"{len(plan.sleep)} sleep"] if plan.sleep else []

    def _advance(self, now: float) -> float:
        if self.time(now) < self._decided_at:
            self._offset = self.traffic.offset = self._decided_at - now
        if self._decided_at == -inf:
            self._began = now
        self._decided_at = self._seen(now)
        return self._decided_at
