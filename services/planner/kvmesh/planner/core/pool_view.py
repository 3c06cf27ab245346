"""One pool as the planner sees it: its workers, their loads, starts and step times."""

import logging
from collections.abc import Sequence
from math import inf

from kvmesh.bus.messages import Instance, Load, PoolPlan, StartPhase, WorkerState
from kvmesh.planner.capacity.profiled_times import KnownTimes, ProfiledTimes
from kvmesh.planner.capacity.queueing import ModelledEngine
from kvmesh.planner.capacity.step_times import StepTimesFit
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.standby import PoolStandby, Rises
from kvmesh.planner.core.starts import Starts

log = logging.getLogger(__name__)


class PoolView:
    """`wanted` is the number of workers that should serve, those that are starting included.

    `cards` are those of workers that serve or drain; `standby` has the others.
    """

    def __init__(self, pool: Pool, startup_s: float) -> None:
        self.pool = pool
        self.starts = Starts(startup_s)
        self.standby = PoolStandby()
        self.rises = Rises()
        self.wanted = 0
        self.cards: dict[str, Instance] = {}
        self._loads: dict[tuple[str, int], Load] = {}
        self._fit: StepTimesFit | None = None
        self._profiled = ProfiledTimes()
        self._kind: ModelledEngine | None = None
        self._set: int | None = None
        self._manual_at = -inf

    @property
    def ready(self) -> list[str]:
        """Instances that take requests."""
        return [i for i, card in self.cards.items() if card.state is WorkerState.SERVING]

    @property
    def stoppable(self) -> list[str]:
        """Ready instances, that with the least running and waiting first."""
        load: dict[str, int] = {}
        for (instance, _), each in self._loads.items():
            load[instance] = load.get(instance, 0) + each.running + each.waiting
        return sorted(self.ready, key=lambda instance: load.get(instance, 0))

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait in the engines or are being computed."""
        return sum(load.prefill_tokens for load in self._loads.values())

    @property
    def saturation(self) -> float:
        """The fuller of KV memory and of two steps of prefill, of the mean worker; 1 is full."""
        loads, kind = self._loads.values(), self.kind()
        if not loads:
            return 0.0
        memory = sum(load.active_blocks / max(load.total_blocks, 1) for load in loads) / len(loads)
        if kind is None:
            return memory
        prefill = sum(load.prefill_tokens for load in loads) / len(loads)
        return max(memory, prefill / (2 * kind.step_tokens))

    @property
    def token_s(self) -> float:
        """Seconds of a worker per prompt token, in full steps; 0 if unknown."""
        kind = self.kind()
        return kind.times.prefill(kind.step_tokens) / kind.step_tokens if kind else 0.0

    def most(self, now: float) -> int:
        """The most workers now: no new ones while starts of this pool fail."""
        if self.starts.blocked(now):
            able = len(self.ready) + len(self.standby.cards)
            return max(min(self.pool.max, able), self.pool.min)
        return self.pool.max

    @property
    def lag_s(self) -> float:
        """Seconds until one worker more is ready: by a promotion while a parked one is there."""
        return self.starts.promotion_s if self.standby.waiting else self.starts.startup_s

    def promote(self, now: float) -> list[str]:
        """The parked workers to promote now."""
        if not self.pool.promotes:
            return []
        missing = self.wanted - len(self.ready)
        return self.standby.promote(missing, self.starts.promotion_s, now)

    def surplus(self, now: float) -> int:
        """The number of ready workers that are too many, and are to be on standby."""
        if not self.pool.promotes:
            return 0
        return self.standby.surplus(len(self.ready) - self.wanted, now)

    def fall_asleep(self, stop: Sequence[str], before: int, now: float) -> list[str]:
        """Those of the workers to `stop` that sleep instead; `before` workers were wanted."""
        leaving = [self.cards[instance] for instance in stop if instance in self.cards]
        return self.standby.resize(self.wanted - before, leaving, self.pool.asleep, now)

    def stays_awake(self, instance: str, now: float) -> None:
        """A worker that was told to sleep serves on: it counts as one that serves again."""
        if instance in self.cards and self.standby.refused(instance, now):
            self.shift(1)

    def kind(self) -> ModelledEngine | None:
        """The engine of this pool's workers, as of its last worker; None until it is known."""
        known, limits = self.step_times, self._limits()
        if known is not None and limits is not None:
            self._kind = ModelledEngine(known.times, *limits)
        return self._kind

    @property
    def step_times(self) -> KnownTimes | None:
        """The step times of this pool's workers, with their source; None until they are known."""
        if self.pool.step_profile is not None:
            return self._profiled.known(self.pool.step_profile, self._fit)
        fitted = self._fit.fitted() if self._fit is not None else None
        return KnownTimes(fitted, "fit") if fitted is not None else None

    @property
    def samples(self) -> int:
        """Samples of step times from the loads of this pool's workers."""
        return self._fit.samples if self._fit is not None else 0

    def _limits(self) -> tuple[int, int, int] | None:
        """Tokens and sequences of a step, and KV tokens, by a card; without, by the profile."""
        profile = self.pool.step_profile
        described = profile.limits if profile is not None else None
        card = next(iter(self.cards.values()), None)
        if card is not None and card.capacity is not None and card.model is not None:
            capacity = card.capacity
            kv_tokens = capacity.blocks * card.model.block_size
            if not kv_tokens and described is not None:  # an engine that reports no memory
                kv_tokens = described.kv_tokens
            if kv_tokens or profile is None:
                return (
                    max(capacity.max_batched_tokens, 1),
                    max(capacity.max_sequences, 1),
                    kv_tokens,
                )
        elif described is not None and self._kind is None:
            return described.max_batched_tokens, described.max_sequences, described.kv_tokens
        return None

    def joined(self, card: Instance, now: float, begun: bool) -> None:
        """A worker serves or drains; it has `begun` unless it is one of those that start."""
        known = self.cards.get(card.instance)
        self.cards[card.instance] = card
        if card.state is WorkerState.SERVING and not begun:
            self.starts.ready(now, _start_s(card), card.promoted_s)
        self.standby.serves(card.instance)
        drained = known is not None and known.state is WorkerState.DRAINING
        if drained and card.state is WorkerState.SERVING and self.standby.has_told(card.instance):
            log.warning("%s serves on: nobody else can continue its requests", card.instance)
            self.stays_awake(card.instance, now)
        if self._fit is None and card.capacity is not None and card.model is not None:
            size, capacity = card.model.block_size, card.capacity
            self._fit = StepTimesFit(size, capacity.max_batched_tokens, capacity.blocks * size)
        if self._set is None:
            self.wanted = max(self.wanted, len(self.ready))

    def left(self, instance: str) -> None:
        self.cards.pop(instance, None)
        self.standby.left(instance, self.cards)
        if self._fit is not None:
            self._fit.left(instance)
        for key in [key for key in self._loads if key[0] == instance]:
            del self._loads[key]

    def on_load(self, load: Load) -> None:
        self._loads[load.instance, load.rank] = load
        if self._fit is not None:
            self._fit.add(load)

    def observe_wanted(self, wanted: int, now: float) -> bool:
        """Take over the number that the place keeps running; True if someone else changed it."""
        manual = self._set is not None and wanted != self._set
        if manual:
            self._manual_at = now
        if wanted != self.wanted:
            self.starts.begin(max(wanted - self.wanted, 0), now, seen=self._set is not None)
            self.starts.cancel(max(self.wanted - wanted, 0))
        self.wanted = self._set = wanted
        return manual

    def shift(self, count: int) -> None:
        """Count `count` workers more, which have come from another pool or have gone there."""
        self.wanted = max(self.wanted + count, 0)
        if self._set is not None:
            self._set = self.wanted

    def assume(self, wanted: int, now: float) -> None:
        """Take over a number that this planner has not set, such as that of the workers present.

        Those of them that are absent count as starting.
        """
        starting = max(wanted - len(self.cards), 0) - self.starts.pending
        self.starts.begin(max(starting, 0), now, seen=False)
        self.starts.cancel(max(-starting, 0))
        self.wanted, self._set = wanted, None

    def held(self, now: float, hold_s: float) -> bool:
        """True while a change by hand is respected."""
        return now - self._manual_at < hold_s

    @property
    def manual_at(self) -> float:
        """The time of the last change by hand; -inf if there was none."""
        return self._manual_at

    def remember(self, plan: PoolPlan, now: float) -> None:
        """Take over what an earlier planner has recorded, up to `now`."""
        self._manual_at = _past(plan.manual_at, now)
        blocked_at = _past(plan.blocked_at, now)
        self.starts.remember(max(plan.startup_s, 0.1), blocked_at, plan.promotion_s)

    def want(self, count: int, now: float) -> None:
        """Set the wanted number."""
        self.starts.begin(max(count - self.wanted, 0), now)
        self.starts.cancel(max(self.wanted - count, 0))
        self.wanted = self._set = count

    def give_up(self, now: float, hold_s: float, reported: int = 0) -> int:
        """Give up workers that never became ready; returns their number.

        Those that have `reported` that they start are waited for, and all while a change by hand is
        respected.
        """
        if self.held(now, hold_s):
            return 0
        given_up = self.starts.give_up(now, reported)
        if given_up:
            self.wanted = self._set = max(self.wanted - given_up, 0)
        return given_up


def _start_s(card: Instance) -> float:
    """Seconds of a worker's start by its card, without waits: parked, and maybe for NATS."""
    waits = (StartPhase.PARKED, StartPhase.REGISTRATION, StartPhase.ROUTABLE)
    return sum(p.seconds for p in card.phases if p.name not in waits) or card.startup_s


def _past(time: float, now: float) -> float:
    """A recorded time; -inf if there is none, `now` if the clock of its planner was ahead."""
    return min(time, now) if time > 0 else -inf
