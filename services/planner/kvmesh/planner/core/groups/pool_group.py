"""The decisions about the pools that serve one part of requests; no I/O, no clock."""

from math import ceil, inf

from kvmesh.planner.capacity.queueing import RequestShape
from kvmesh.planner.core.fleets import (
    Bounds,
    Counts,
    efficient_fleets,
)
from kvmesh.planner.core.groups.backlog import backlog_s, extra_capacity, overloaded
from kvmesh.planner.core.groups.candidates import Plan, total_capacity
from kvmesh.planner.core.groups.evaluation import (
    FleetEvaluation,
    FleetEvaluator,
)
from kvmesh.planner.core.groups.past_needs import PastNeeds
from kvmesh.planner.core.groups.planned_model import PlannedModel
from kvmesh.planner.core.groups.reverted_scale_downs import RevertedScaleDowns
from kvmesh.planner.core.groups.role_switches import exchangeable
from kvmesh.planner.core.groups.sizes import grown, least_awake, shrunk, within_bounds
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool

EVALUATE_S = 30.0
MOVED = 0.05  # change of the level that calls for another evaluation
# Shares of what a promise leaves open: a pool shrinks only to a fleet that is better than promised,
# and does not grow for a fleet that is a little worse.
DOWN_MARGIN = 0.3
UP_MARGIN = -0.2
PROVEN_MARGIN = -3.0  # likewise, of a fleet that has kept the promises
WORTH = 1.25  # largest fleet over one that nearly keeps the promises
LEAST_SHAPES = 30


class PoolGroup:
    """The pools that serve the same part of requests: whole ones and decodes, or prefills."""

    def __init__(self, core: PlannedModel, views: list[PoolView], serves: tuple[str, ...]) -> None:
        self._core = core
        self.views = views
        self._evaluator = FleetEvaluator(core, views, serves)
        self._needs = PastNeeds()
        self._evaluated_at = -inf
        self._evaluated_level = 0.0
        self._evaluated_counts: Counts = ()
        self._reverted = RevertedScaleDowns()
        self._changed_at = -inf
        self._added_at = -inf
        self._judged: tuple[FleetEvaluation, Counts] | None = None
        self._lacking: tuple[float, list[float], Counts] | None = None
        self.missing = 0  # workers that are needed beyond what the budget permitted

    @property
    def unreachable(self) -> set[str]:
        """The promises that even an idle worker cannot keep."""
        return self._evaluator.unreachable

    @property
    def _pools(self) -> list[Pool]:
        return [view.pool for view in self.views]

    @property
    def _options(self) -> PlanOptions:
        return self._core.options

    def evaluate_again(self) -> None:
        """Evaluate at the next decision, as if for the first time: the promises may be others."""
        self._evaluated_at = -inf
        self._reverted = RevertedScaleDowns()
        self._evaluator.unreachable.clear()

    @property
    def changed_at(self) -> float:
        """The time of the last change; -inf if there was none."""
        return self._changed_at

    def changed(self, now: float) -> None:
        """Count `now` as the time of the last change: the cool-down of removals begins."""
        self._changed_at = now

    def decide(self, now: float, level: float, plan: Plan) -> list[str]:
        """Change the wanted numbers of this group's pools; returns the reasons."""
        self.missing, self._lacking = 0, None
        held = [view for view in self.views if view.held(now, self._options.manual_hold_s)]
        if held:
            return [f"{view.pool.name} was changed by hand" for view in held]
        counts = tuple(view.wanted for view in self.views)
        bounded = within_bounds(counts, self._pools, self._devices_left())
        if bounded != counts:
            self._changed_at = now
            return self._reduce(now, bounded, plan)
        least = tuple(view.pool.min for view in self.views)
        if self._core.idle(now):
            reasons = self._to_least(now, counts, least, plan)
            return ["idle", *reasons] if reasons else []
        startup = max(view.lag_s for view in self.views)
        backlog = self._backlog_s()
        due = (
            now - self._evaluated_at >= EVALUATE_S
            or abs(level - self._evaluated_level) > MOVED * max(self._evaluated_level, 1e-9)
            or counts != self._evaluated_counts
            or (not sum(counts) and self._requests_wait(now))
        )
        if not due and backlog <= 0:
            return []
        self._evaluated_at, self._evaluated_level = now, level
        self._evaluated_counts = counts
        reasons = self._resize(now, level, counts, startup, backlog, plan)
        self._evaluated_counts = tuple(view.wanted for view in self.views)
        return reasons

    # need

    def _resize(
        self,
        now: float,
        level: float,
        counts: Counts,
        startup: float,
        backlog: float,
        plan: Plan,
    ) -> list[str]:
        if level <= 0 and self._core.quiet_s(now) >= self._hold_s(startup):
            return self._to_least(now, counts, least_awake(counts, self._pools), plan)
        proven = self._core.proven(now)
        shapes = self._evaluator.shapes(level, proven)
        if proven and level > 0 and not shapes:  # no long prompts, for prefill workers
            return self._to_least(now, counts, tuple(v.pool.min for v in self.views), plan)
        if len(shapes) < (1 if proven else LEAST_SHAPES) or not self._knows_speeds():
            return self._without_model(now, counts, shapes)
        found = self._evaluator.evaluate(now, level, shapes, proven, self._saturated())
        bounds, speeds = self._bounds(now), found.speeds
        fleets = efficient_fleets(self._pools, speeds, bounds)
        if sum(bounds.most):
            fleets = [fleet for fleet in fleets if sum(fleet)]
        if not fleets:
            return ["the budget permits no fleet"]
        have = total_capacity(counts, speeds)
        if backlog <= 0 and self._suffices(now, counts, level, startup, bounds, found):
            fleets = [fleet for fleet in fleets if total_capacity(fleet, speeds) <= have]
        needed = self._needed(found, fleets)
        ready = tuple(len(view.ready) for view in self.views)
        capacity = total_capacity(needed, speeds)
        capacity += extra_capacity(
            capacity,
            total_capacity(ready, speeds),
            startup,
            backlog,
            overloaded(found.model, found.aimed, ready),
        )
        self._needs.add(capacity, now, self._hold_s(startup))
        self._judged = found, bounds.least
        reasons: list[str] = []
        if capacity > have + 1e-9:
            reasons = self._grow(now, counts, level, capacity, speeds, bounds)
        elif found.sure and not self._overdue(now):
            reasons = self._shrink(now, counts, level, found, bounds.least, plan)
        plan.candidates += found.model.evaluated(self._pools)
        return reasons

    def _knows_speeds(self) -> bool:
        """True if the step times of a pool are known, and those of each that has ready workers."""
        known = [view.kind() is not None for view in self.views]
        ready = [bool(view.ready) for view in self.views]
        return any(known) and all(k or not r for k, r in zip(known, ready, strict=True))

    def _bounds(self, now: float) -> Bounds:
        """The numbers of workers that the pools and the budget permit now."""
        upper = tuple(view.most(now) for view in self.views)
        lower = tuple(
            min(view.pool.min, most) for view, most in zip(self.views, upper, strict=True)
        )
        return Bounds(lower, upper, self._devices_left())

    def _suffices(
        self,
        now: float,
        counts: Counts,
        level: float,
        startup: float,
        bounds: Bounds,
        found: FleetEvaluation,
    ) -> bool:
        """True if the fleet keeps the promises nearly, or has kept them whatever the model says."""
        within = all(
            low <= n <= high for n, low, high in zip(counts, bounds.least, bounds.most, strict=True)
        )
        if not within or not found.sure:
            return False
        if found.model.keeps(counts, UP_MARGIN):
            return True
        served = self._changed_at + startup
        return found.model.keeps(counts, PROVEN_MARGIN) and self._evaluator.measured.keeps(
            found.aimed, level, served, now
        )

    def _needed(self, found: FleetEvaluation, fleets: list[Counts]) -> Counts:
        """The smallest fleet that keeps the promises; one that nearly does if much smaller.

        A few long prompts, late on any fleet, would otherwise call for many workers.
        """
        needed = found.model.smallest(fleets, 0.0 if found.sure else DOWN_MARGIN)
        nearly = found.model.smallest(fleets, UP_MARGIN)
        most = WORTH * total_capacity(nearly, found.speeds)
        return needed if total_capacity(needed, found.speeds) <= most else nearly

    def _to_least(self, now: float, counts: Counts, least: Counts, plan: Plan) -> list[str]:
        """Shrink to `least` after the cool-down."""
        if counts == least or now - self._changed_at < self._options.down_cooldown_s:
            return []
        self._changed_at = now
        return self._reduce(now, least, plan)

    def _without_model(self, now: float, counts: Counts, shapes: list[RequestShape]) -> list[str]:
        """No step times or too few requests yet: keep each pool as it is, and one worker awake."""
        if sum(counts) or not (shapes or self._requests_wait(now)):
            return []
        left = self._devices_left()
        places = [
            n
            for n, view in enumerate(self.views)
            if view.most(now) > 0 and view.pool.devices <= left
        ]
        if not places:
            return ["a worker is needed, but no pool can start one"]
        cheapest = min(places, key=lambda n: self.views[n].pool.cost)
        return self._set(tuple(int(n == cheapest) for n in range(len(counts))), now)

    def _requests_wait(self, now: float) -> bool:
        return bool(self._core.traffic.waiting or self._core.requests_without_worker(now))

    def _saturated(self) -> bool:
        """True if the requests that wait in routers wait for this group."""
        if not self._evaluator.splits:
            return True
        return self is max(self._core.groups, key=lambda group: group.saturation())

    def saturation(self) -> float:
        """The fuller of KV memory and of two steps of prefill, of the mean worker; 1 is full."""
        views = [view for view in self.views if view.ready]
        return max((view.saturation for view in views), default=2.0)

    def _overdue(self, now: float) -> bool:
        """True if requests wait for longer than promised, whatever they wait for."""
        return self._core.traffic.oldest_wait(now) > self._patience

    @property
    def _patience(self) -> float:
        """The shortest time to a first token that is promised, in seconds."""
        return min((p.seconds for p in self._core.promises if p.metric == "ttft"), default=2.0)

    def _backlog_s(self) -> float:
        """Seconds that the ready workers need for the prompts that wait; 0 if that is in time."""
        waiting = self._core.traffic.waiting_tokens if self._saturated() else 0
        return backlog_s(self.views, waiting, self._core.batch.prefill_tokens, self._patience)

    # changes

    def _hold_s(self, startup: float) -> float:
        """Seconds for which a past need keeps workers."""
        return max(self._options.down_cooldown_s, startup) + EVALUATE_S

    def _grow(
        self,
        now: float,
        counts: Counts,
        level: float,
        capacity: float,
        speeds: list[float],
        bounds: Bounds,
    ) -> list[str]:
        if now - self._added_at < self._options.up_cooldown_s:
            return ["more workers are needed, within the cool-down"]
        above = tuple(max(have, most) for have, most in zip(counts, bounds.most, strict=True))
        permitted = Bounds(counts, above, bounds.max_devices)
        target = grown(counts, capacity, self._pools, speeds, permitted)
        self._miss(capacity, target, speeds, above)
        if target == counts:
            return ["more workers are needed than the budget permits"]
        self._changed_at = self._added_at = now
        self._reverted.added(total_capacity(target, speeds), level, now)
        return self._set(target, now)

    def _shrink(
        self,
        now: float,
        counts: Counts,
        level: float,
        found: FleetEvaluation,
        lower: Counts,
        plan: Plan,
    ) -> list[str]:
        if now - self._changed_at < self._options.down_cooldown_s:
            return []
        held = max(self._needs.most(), self._reverted.least(level, now))
        target = shrunk(counts, held, self._pools, found.speeds, lower, found.cold, DOWN_MARGIN)
        if target == counts:
            return []
        self._changed_at = now
        self._reverted.removed(total_capacity(counts, found.speeds), level, now)
        return self._reduce(now, target, plan)

    # exchanges

    def spare(self, now: float, most: int, taker: Pool, plan: Plan) -> list[str]:
        """Give up to `most` workers to `taker`, whose need is present; returns the reasons.

        The proof is that of shrinking. A switch takes seconds and can be taken back, so the needs
        of the cool-down are proof enough, without those of a start-up time.
        """
        counts = tuple(view.wanted for view in self.views)
        judged, since = self._judged, now - self._options.down_cooldown_s
        if judged is None or self._is_unsettled(now, since):
            return []
        found, lower = judged
        able = [
            sum(self._core.switches.may(instance, now) for instance in view.ready)
            if exchangeable(view.pool, taker)
            else 0
            for view in self.views
        ]
        lower = tuple(
            max(low, have - min(most, number))
            for low, have, number in zip(lower, counts, able, strict=True)
        )
        held = self._needs.most(since)
        target = shrunk(counts, held, self._pools, found.speeds, lower, found.cold, DOWN_MARGIN)
        if target == counts:
            return []
        self._changed_at = now
        for view, after in zip(self.views, target, strict=True):
            able_ones = [i for i in view.stoppable if self._core.switches.may(i, now)]
            plan.stop += self._core.worth.least(able_ones, now)[: view.wanted - after]
        return self._set(target, now)

    def _is_unsettled(self, now: float, since: float) -> bool:
        """True unless the fleet has been complete, left alone and in time since `since`."""
        return (
            now - self._evaluated_at > EVALUATE_S
            or self._changed_at > since
            or any(view.starts.pending or len(view.ready) < view.wanted for view in self.views)
            or any(view.held(now, self._options.manual_hold_s) for view in self.views)
            or (self._overdue(now) and self._saturated())
            or self._backlog_s() > 0
            or not self._needs.known_since(since)
        )

    def grow_further(self, now: float) -> list[str]:
        """Grow once more if the budget was too small and another group has given workers."""
        if self._lacking is None:
            return []
        capacity, speeds, upper = self._lacking
        counts = tuple(view.wanted for view in self.views)
        target = grown(
            counts, capacity, self._pools, speeds, Bounds(counts, upper, self._devices_left())
        )
        if target == counts:
            return []
        self._changed_at = self._added_at = now
        return self._set(target, now)

    def _miss(self, capacity: float, target: Counts, speeds: list[float], upper: Counts) -> None:
        """Remember what the budget did not permit."""
        lacking = capacity - total_capacity(target, speeds)
        if lacking > 1e-9 and any(n < most for n, most in zip(target, upper, strict=True)):
            self._lacking = capacity, speeds, upper
            self.missing = ceil(lacking / max(speeds))

    def _reduce(self, now: float, target: Counts, plan: Plan) -> list[str]:
        """Set the numbers; where one falls, name the workers to stop."""
        for view, after in zip(self.views, target, strict=True):
            stopped = view.wanted - after - view.starts.pending
            if stopped > 0:
                plan.stop += self._core.worth.least(view.stoppable, now)[:stopped]
        return self._set(target, now)

    def _set(self, target: Counts, now: float) -> list[str]:
        reasons = []
        for view, count in zip(self.views, target, strict=True):
            if count != view.wanted:
                reasons.append(f"{view.pool.name} {view.wanted} → {count}")
                view.want(count, now)
        return reasons

    def _devices_left(self) -> float:
        others = sum(
            view.wanted * view.pool.devices for view in self._core.pools if view not in self.views
        )
        return self._options.max_devices - others - self._core.devices_elsewhere
