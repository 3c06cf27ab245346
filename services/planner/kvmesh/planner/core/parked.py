"""The workers of one pool that are parked or asleep: those to promote, and those to be it next."""

from collections import deque
from collections.abc import Collection, Iterable
from math import inf

from kvmesh.bus.messages import Instance
from kvmesh.bus.subjects import name_of

LEAST_PATIENCE_S = 30.0
PATIENCE = 3.0  # times the learned time of a promotion
REFUSED_S = 600.0
RISES_S = 4 * 3600.0
MOST_CHANGES = 1024
SURPLUS_S = 30.0  # a worker that stops shows on its card before


class ParkedPool:
    """Promotions under way count as workers until they are ready, or take too long."""

    def __init__(self) -> None:
        self.cards: dict[str, Instance] = {}
        self._promoted: dict[str, float] = {}
        self._surplus_since = inf

    @property
    def promoted(self) -> int:
        """Promotions under way."""
        return len(self._promoted)

    @property
    def waiting(self) -> list[str]:
        """Instances that can be promoted: those asleep first, then the one parked longest."""
        waiting = (card for card in self.cards.values() if card.instance not in self._promoted)
        ordered = sorted(waiting, key=lambda card: (not card.asleep, card.started))
        return [card.instance for card in ordered]

    def add(self, card: Instance) -> None:
        """A worker is parked; an earlier instance of its name that was promoted has failed."""
        self.cards[card.instance] = card
        failed = [i for i in self._promoted if i != card.instance and name_of(i) == card.name]
        for instance in failed:
            self.failed(instance)

    def ready(self, instance: str) -> None:
        """A worker serves; it is no longer being promoted."""
        self._promoted.pop(instance, None)

    def failed(self, instance: str) -> None:
        """A promotion was refused, or its worker does not reply."""
        self._promoted.pop(instance, None)

    def promote(self, missing: int, promotion_s: float, now: float) -> list[str]:
        """The instances to promote now where `missing` workers are neither ready nor stopping."""
        limit = max(PATIENCE * promotion_s, LEAST_PATIENCE_S)
        self._promoted = {i: at for i, at in self._promoted.items() if 0 <= now - at <= limit}
        chosen = self.waiting[: max(missing - len(self._promoted), 0)]
        self._promoted |= dict.fromkeys(chosen, now)
        return chosen

    def surplus(self, ready: Collection[str], wanted: int, now: float) -> int:
        """The number of ready workers that have been too many for SURPLUS_S seconds.

        A place that does not choose may have stopped a parked worker instead of a ready one.
        """
        if len(ready) <= wanted:
            self._surplus_since = inf
            return 0
        self._surplus_since = min(self._surplus_since, now)
        if now - self._surplus_since < SURPLUS_S:
            return 0
        self._surplus_since = inf
        return len(ready) - wanted


class SleepingPool:
    """`count` workers sleep, or are about to, beyond those that the pool keeps parked.

    The place runs them beside the others, so its number stays the same when one falls asleep.
    """

    def __init__(self) -> None:
        self.count = 0
        self.told: set[str] = set()  # instances told to sleep, and not gone yet
        self._refused: dict[str, float] = {}

    def fall(self, leaving: Iterable[Instance], most: int, now: float) -> list[str]:
        """The instances of those `leaving` that sleep instead, `most` of the pool at a time."""
        chosen = [card.instance for card in leaving if self.able(card, now)]
        chosen = chosen[: max(most - self.count, 0)]
        self.count += len(chosen)
        return chosen

    def able(self, card: Instance, now: float) -> bool:
        """True if a worker can be told to sleep; False for a while after it has refused."""
        refused_at = self._refused.get(card.instance)
        return card.sleeps and not (refused_at is not None and 0 <= now - refused_at < REFUSED_S)

    def rise(self, more: int) -> None:
        """The pool wants `more` workers: those that sleep count among them first."""
        self.count -= min(max(more, 0), self.count)

    def refused(self, instance: str, asleep: int, now: float) -> bool:
        """A worker that was told to sleep serves on; True if it counted, beside those `asleep`."""
        self._refused[instance] = now
        self.told.discard(instance)
        counted = self.count > asleep + len(self.told)
        self.count -= counted
        return counted

    def keep(self, instances: Collection[str]) -> None:
        """Forget what is known of workers that are gone."""
        self.told.intersection_update(instances)
        self._refused = {i: at for i, at in self._refused.items() if i in instances}


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
