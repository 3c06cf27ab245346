"""The workers of one pool on standby, parked or asleep: whom to promote, who joins them."""

from collections import deque
from collections.abc import Collection, Sequence
from math import inf

from kvmesh.bus.messages import Instance
from kvmesh.bus.subjects import name_of

LEAST_PATIENCE_S = 30.0
PATIENCE = 3.0  # times the learned time of a promotion
REFUSED_S = 600.0
RISES_S = 4 * 3600.0
MOST_CHANGES = 1024
SURPLUS_S = 30.0  # a worker that stops shows on its card before


class PoolStandby:
    """Cards of the workers on standby, promotions under way, and workers told to sleep.

    A promotion counts as a worker until that is ready, or takes too long. `asleep` workers sleep,
    or are about to, beyond those that the pool keeps parked: the place runs them beside the others,
    so its number stays the same when one falls asleep.
    """

    def __init__(self) -> None:
        self.cards: dict[str, Instance] = {}
        self.asleep = 0
        self._promoted: dict[str, float] = {}
        self._told: set[str] = set()  # instances told to sleep, and not gone yet
        self._refused: dict[str, float] = {}
        self._surplus_since = inf

    @property
    def waiting(self) -> list[str]:
        """Instances that can be promoted: those asleep first, then the one parked longest."""
        waiting = (card for card in self.cards.values() if card.instance not in self._promoted)
        ordered = sorted(waiting, key=lambda card: (not card.asleep, card.started))
        return [card.instance for card in ordered]

    def joined(self, card: Instance) -> None:
        """A worker is on standby; an earlier instance of its name that was promoted has failed."""
        self.cards[card.instance] = card
        for instance in list(self._promoted):
            if instance != card.instance and name_of(instance) == card.name:
                self.not_promoted(instance)

    def serves(self, instance: str) -> None:
        """A worker is no longer on standby, nor being promoted."""
        self.cards.pop(instance, None)
        self._promoted.pop(instance, None)

    def not_promoted(self, instance: str) -> None:
        """A promotion was refused, or its worker does not reply."""
        self._promoted.pop(instance, None)

    def promote(self, missing: int, promotion_s: float, now: float) -> list[str]:
        """The instances to promote now where `missing` workers are neither ready nor stopping."""
        limit = max(PATIENCE * promotion_s, LEAST_PATIENCE_S)
        self._promoted = {i: at for i, at in self._promoted.items() if 0 <= now - at <= limit}
        chosen = self.waiting[: max(missing - len(self._promoted), 0)]
        self._promoted |= dict.fromkeys(chosen, now)
        return chosen

    def surplus(self, more: int, now: float) -> int:
        """The number of ready workers that have been too many, now `more`, for SURPLUS_S seconds.

        A place that does not choose may have stopped a parked worker instead of a ready one.
        """
        if more <= 0:
            self._surplus_since = inf
            return 0
        self._surplus_since = min(self._surplus_since, now)
        if now - self._surplus_since < SURPLUS_S:
            return 0
        self._surplus_since = inf
        return more

    def can_sleep(self, card: Instance, now: float) -> bool:
        """True if a worker can be told to sleep; False for a while after it has refused."""
        refused_at = self._refused.get(card.instance)
        return card.sleeps and not (refused_at is not None and 0 <= now - refused_at < REFUSED_S)

    def resize(
        self, more: int, leaving: Sequence[Instance], max_asleep: int, now: float
    ) -> list[str]:
        """Let workers sleep, `max_asleep` at a time, where the pool wants `more` workers, or fewer.

        Returns the instances of those `leaving` that sleep instead. In a growing pool those asleep
        are the first of the added ones.
        """
        if more >= 0:
            self.asleep -= min(more, self.asleep)
            return []
        able = [card.instance for card in leaving if self.can_sleep(card, now)]
        chosen = able[: max(max_asleep - self.asleep, 0)]
        self.asleep += len(chosen)
        return chosen

    def tell(self, instance: str) -> None:
        """A worker is told to sleep."""
        self._told.add(instance)

    def has_told(self, instance: str) -> bool:
        """True if a worker was told to sleep and has not left since."""
        return instance in self._told

    def refused(self, instance: str, now: float) -> bool:
        """A worker that was told to sleep serves on; True if it counted as one asleep until now."""
        self._refused[instance] = now
        self._told.discard(instance)
        present = sum(self.cards[each].asleep for each in self.waiting)
        counted = self.asleep > present + len(self._told)
        self.asleep -= counted
        return counted

    def left(self, instance: str, present: Collection[str]) -> None:
        """A worker has left; forget what is known of others than those `present`."""
        self.cards.pop(instance, None)
        self._told.intersection_update(present)
        self._refused = {i: at for i, at in self._refused.items() if i in present}


class Rises:
    """Growth of a pool in the last RISES_S seconds, for which parked workers would be good."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque(maxlen=MOST_CHANGES)

    def note(self, wanted: int, now: float) -> None:
        """The pool wants so many workers from now on."""
        if not self._changes or self._changes[-1][1] != wanted:
            self._changes.append((now, wanted))
        while len(self._changes) > 1 and now - self._changes[1][0] > RISES_S:
            self._changes.popleft()

    def most(self, within_s: float) -> int:
        """The most workers by which the number has risen within so many seconds."""
        most, recent = 0, deque[tuple[float, int]]()
        for at, wanted in self._changes:
            while len(recent) > 1 and at - recent[1][0] >= within_s:
                recent.popleft()
            recent.append((at, wanted))
            most = max(most, wanted - min(before for _, before in recent))
        return most
