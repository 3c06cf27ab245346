"""The decisions about the pools that serve one part of requests; no I/O, no clock."""

from collections import deque
from collections.abc import Sequence
from math import ceil, inf

from kvmesh.bus.messages import FleetAnswer, FleetQuestion
from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape
from kvmesh.planner.core.fleets import (
    Aim,
    Bounds,
    Counts,
    aims,
    efficient_fleets,
    part_of,
    relative_speeds,
)
from kvmesh.planner.core.groups.candidates import CandidateFleets, Plan, total_capacity
from kvmesh.planner.core.groups.measured_fleet import MeasuredFleet
from kvmesh.planner.core.groups.planned_model import PlannedModel
from kvmesh.planner.core.groups.role_switches import exchangeable
from kvmesh.planner.core.groups.sizes import grown, least_awake, shrunk, within_bounds
from kvmesh.planner.core.groups.taken_back import TakenBack
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.core.scenario import scenario
from kvmesh.planner.core.simulation.simulated_fleets import SimulatedFleets

EVALUATE_S = 30.0
MOVED = 0.05  # change of the level that calls for another evaluation
# Shares of what a promise leaves open: a pool shrinks only to a fleet that is better than promised,
# and does not grow for a fleet that is a little worse.
DOWN_MARGIN = 0.3
UP_MARGIN = -0.2
PROVEN_MARGIN = -3.0  # likewise, of a fleet that has kept the promises
WORTH = 1.25  # largest fleet over one that nearly keeps the promises
LEAST_SHAPES = 30
OVERLOADED = 0.5  # part of the promised share
DRAIN_S = 60.0  # least time in which a backlog is to be worked off
SURE_SHAPES = 200  # fewer requests of a part of the window do not prove that less suffices
MOST_NEEDS = 1024


class PoolGroup:
    """The pools that serve the same part of requests: whole ones and decodes, or prefills."""

    def __init__(self, core: PlannedModel, views: list[PoolView], serves: tuple[str, ...]) -> None:
        self._core = core
        self.views = views
        self._serves = serves
        self.unreachable: set[str] = set()
        self.simulated = SimulatedFleets()
        self._needs: deque[tuple[float, float]] = deque(maxlen=MOST_NEEDS)
        self._evaluated_at = -inf
        self._evaluated_level = 0.0
        self._evaluated_counts: Counts = ()
        self._measured = MeasuredFleet(core)
        self._taken_back = TakenBack()
        self._changed_at = -inf
        self._added_at = -inf
        self._judged: tuple[CandidateFleets, list[float], Counts] | None = None
        self._lacking: tuple[float, list[float], Counts] | None = None
        self.missing = 0  # workers that are needed beyond what the budget permitted

    @property
    def _splits(self) -> bool:
        """True if prompts are computed by other workers than those that decode."""
        return any(view.pool.serves == "prefill" and view.wanted for view in self._core.pools)

    @property
    def _pools(self) -> list[Pool]:
        return [view.pool for view in self.views]

    @property
    def _options(self) -> PlanOptions:
        return self._core.options

    def _promises(self) -> list[Promise]:
        promises = self._core.promises
        if "prefill" in self._serves:
            return [promise for promise in promises if promise.metric != "itl"]
        return promises

    def evaluate_again(self) -> None:
        """Evaluate at the next decision, whatever has changed."""
        self._evaluated_at = -inf
        self.unreachable.clear()

    def answered(self, question: FleetQuestion, answer: FleetAnswer, now: float) -> None:
        """Use the answer of an oracle at the next decision."""
        self.simulated.answered(question, answer, now)
        self._evaluated_at = -inf

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
        startup = max(view.starts.startup_s for view in self.views)
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

    def _shapes(self, level: float, fewest: int, cold: bool = False) -> list[RequestShape]:
        shapes = scenario(self._core.traffic, self._core.demand.series, level, fewest, cold)
        return part_of(shapes, self._serves, self._splits, self._options.disagg_tokens)

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
        fewest = SURE_SHAPES if proven else 0
        shapes = self._shapes(level, fewest)
        known = [view.kind() is not None for view in self.views]
        if proven and level > 0 and not shapes:  # no long prompts, for prefill workers
            return self._to_least(now, counts, tuple(v.pool.min for v in self.views), plan)
        if (
            len(shapes) < (1 if proven else LEAST_SHAPES)
            or not any(known)
            or any(view.ready and not k for view, k in zip(self.views, known, strict=True))
        ):
            return self._without_model(now, counts, shapes)
        reference = next(kind for view in self.views if (kind := view.kind()) is not None)
        kinds = [self._measured.slowed(view.kind() or reference) for view in self.views]
        speeds = relative_speeds(kinds, shapes)
        aimed = self._aims(shapes, kinds)
        model = CandidateFleets(shapes, kinds, aimed)
        cold = self._shapes(level, fewest, cold=True)
        as_seen = CandidateFleets(cold, kinds, self._aims(cold, kinds)) if cold != shapes else model
        ready = tuple(len(view.ready) for view in self.views)
        self._measured.calibrate(ready, as_seen, aimed, now, self._saturated())
        self._expect_simulation(kinds, aimed, level)
        for each in (model, as_seen):
            each.use(self.simulated.known(now), speeds)
        bounds = self._bounds(now)
        lower, upper, devices = bounds.least, bounds.most, bounds.max_devices
        fleets = [
            fleet
            for fleet in efficient_fleets(self._pools, speeds, bounds)
            if sum(fleet) or not sum(upper)
        ]
        if not fleets:
            return ["the budget permits no fleet"]
        sure = proven or len(shapes) >= SURE_SHAPES
        within = all(low <= n <= high for n, low, high in zip(counts, lower, upper, strict=True))
        settled = within and sure and backlog <= 0
        if settled and self._suffices(now, counts, level, startup, model, aimed):
            fleets = [
                f for f in fleets if total_capacity(f, speeds) <= total_capacity(counts, speeds)
            ]
        needed = self._needed(model, fleets, speeds, sure)
        capacity = total_capacity(needed, speeds)
        self.simulated.ask(now, needed, counts, fleets, self._core.demand.series)
        extra = self._extra(capacity, backlog, speeds, self._overloaded(model, aimed))
        self._remember(now, capacity + extra, startup)
        have = total_capacity(counts, speeds)
        self._judged = as_seen, speeds, lower
        reasons: list[str] = []
        if capacity + extra > have + 1e-9:
            reasons = self._grow(now, counts, capacity + extra, speeds, upper, devices)
            if self._changed_at == now:
                wanted = tuple(view.wanted for view in self.views)
                self._taken_back.added(total_capacity(wanted, speeds), level, now)
        elif sure and not self._overdue(now):
            least = self._taken_back.least(level, now)
            reasons = self._shrink(now, counts, as_seen, speeds, lower, plan, least)
            if self._changed_at == now:
                self._taken_back.removed(have, level, now)
        plan.candidates += model.evaluated(self._pools)
        return reasons

    def _expect_simulation(
        self, kinds: Sequence[ModelledEngine], aimed: Sequence[Aim], level: float
    ) -> None:
        """State what a simulation would have to answer now; prefills apart are not simulated.

        Its engines are as slow as real ones have shown: it must not contradict measurements.
        """
        simulates = "prefill" not in self._serves and not self._splits
        budget_s = self._options.oracle_budget_s if simulates else 0.0
        self.simulated.expect(self._pools, kinds, aimed, level, budget_s)

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
        model: CandidateFleets,
        aimed: Sequence[Aim],
    ) -> bool:
        """True if the fleet keeps the promises nearly, or has kept them whatever the model says."""
        if model.keeps(counts, UP_MARGIN):
            return True
        served = self._changed_at + startup
        return model.keeps(counts, PROVEN_MARGIN) and self._measured.keeps(
            aimed, level, served, now
        )

    def _needed(
        self, model: CandidateFleets, fleets: list[Counts], speeds: Sequence[float], sure: bool
    ) -> Counts:
        """The smallest fleet that keeps the promises; one that nearly does if much smaller.

        A few long prompts, late on any fleet, would otherwise call for many workers.
        """
        needed = model.smallest(fleets, 0.0 if sure else DOWN_MARGIN)
        nearly = model.smallest(fleets, UP_MARGIN)
        worth = total_capacity(needed, speeds) <= WORTH * total_capacity(nearly, speeds)
        return needed if worth else nearly

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
        return bool(self._core.traffic.waiting or self._core.waking(now))

    def _aims(self, shapes: Sequence[RequestShape], kinds: Sequence[ModelledEngine]) -> list[Aim]:
        found = aims(shapes, kinds, self._promises())
        self.unreachable = {str(aim.promise) for aim in found if not aim.reachable}
        return found

    def _saturated(self) -> bool:
        """True if the requests that wait in routers wait for this group."""
        if not self._splits:
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
        computing = sum(view.prefill_tokens for view in self.views)
        queued = max(computing - self._core.batch.prefill_tokens, 0) + waiting
        ready = sum(len(view.ready) for view in self.views)
        token_s = max((view.token_s for view in self.views), default=0.0)
        wait = queued * token_s / max(ready, 1)
        return wait if wait > 2 * self._patience else 0.0

    def _overloaded(self, model: CandidateFleets, aimed: Sequence[Aim]) -> bool:
        """True if so many first tokens are late on the ready workers that their queues grow."""
        shares = model.kept(tuple(len(view.ready) for view in self.views)).shares
        return any(
            aim.promise.metric != "itl" and share < OVERLOADED * aim.promise.quantile
            for aim, share in zip(aimed, shares, strict=True)
        )

    def _extra(
        self, capacity: float, backlog_s: float, speeds: Sequence[float], overloaded: bool
    ) -> float:
        """Capacity beyond the need that works off what waits once the new workers are ready.

        Until then the waiting work of overloaded workers grows by what they cannot do.
        """
        ready = sum(len(v.ready) * speed for v, speed in zip(self.views, speeds, strict=True))
        startup = max(view.starts.startup_s for view in self.views)
        missing = max(capacity - ready, 0.0) if overloaded else 0.0
        if backlog_s <= 0 and missing <= 0.25 * capacity:
            return 0.0
        return (backlog_s * ready + missing * startup) / max(startup, DRAIN_S)

    # changes

    def _remember(self, now: float, capacity: float, startup: float) -> None:
        self._needs.append((now, capacity))
        while now - self._needs[0][0] > self._hold_s(startup):
            self._needs.popleft()

    def _hold_s(self, startup: float) -> float:
        """Seconds for which a past need keeps workers."""
        return max(self._options.down_cooldown_s, startup) + EVALUATE_S

    def _grow(
        self,
        now: float,
        counts: Counts,
        capacity: float,
        speeds: list[float],
        upper: Counts,
        devices: float,
    ) -> list[str]:
        if now - self._added_at < self._options.up_cooldown_s:
            return ["more workers are needed, within the cool-down"]
        above = tuple(max(have, most) for have, most in zip(counts, upper, strict=True))
        target = grown(counts, capacity, self._pools, speeds, Bounds(counts, above, devices))
        self._miss(capacity, target, speeds, above)
        if target == counts:
            return ["more workers are needed than the budget permits"]
        self._changed_at = self._added_at = now
        return self._set(target, now)

    def _shrink(
        self,
        now: float,
        counts: Counts,
        model: CandidateFleets,
        speeds: Sequence[float],
        lower: Counts,
        plan: Plan,
        needed: float,
    ) -> list[str]:
        if now - self._changed_at < self._options.down_cooldown_s:
            return []
        held = max(needed, *(capacity for _, capacity in self._needs))
        target = shrunk(counts, held, self._pools, speeds, lower, model, DOWN_MARGIN)
        if target == counts:
            return []
        self._changed_at = now
        return self._reduce(now, target, plan)

    # exchanges

    def spare(self, now: float, most: int, taker: Pool, plan: Plan) -> list[str]:
        """Give up to `most` workers to `taker`, whose need is present; returns the reasons.

        The proof is that of shrinking. A switch takes seconds and can be taken back, so the needs
        of the cool-down are proof enough, without those of a start-up time.
        """
        counts = tuple(view.wanted for view in self.views)
        judged, since = self._judged, now - self._options.down_cooldown_s
        if (
            judged is None
            or now - self._evaluated_at > EVALUATE_S
            or self._changed_at > since
            or any(view.starts.pending or len(view.ready) < view.wanted for view in self.views)
            or any(view.held(now, self._options.manual_hold_s) for view in self.views)
            or (self._overdue(now) and self._saturated())
            or self._backlog_s() > 0
            or not self._needs
            or self._needs[0][0] > since
        ):
            return []
        model, speeds, lower = judged
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
        latest = self._needs[-1][1]
        held = max((capacity for at, capacity in self._needs if at >= since), default=latest)
        target = shrunk(counts, held, self._pools, speeds, lower, model, DOWN_MARGIN)
        if target == counts:
            return []
        self._changed_at = now
        for view, after in zip(self.views, target, strict=True):
            able_ones = [i for i in view.stoppable if self._core.switches.may(i, now)]
            plan.stop += self._core.worth.least(able_ones, now)[: view.wanted - after]
        return self._set(target, now)

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
