"""Leases by holder, and the instances to ignore: replaced ones and those whose lease lapsed.

Of several live instances of one worker or kvbm name, the latest started is current.
"""

from kvmesh.bus.messages import Instance, Role
from kvmesh.indexer.decoding import EventSource

REMEMBERED = 4096
ANY_MODEL = ""  # a kvbm holds blocks of several models, each under a rank of its own


def source_of_card(card: Instance) -> EventSource | None:
    """The source of the events that a card's instance publishes; None unless it holds blocks."""
    if card.role is Role.KVBM:
        return EventSource(ANY_MODEL, card.name)
    if card.role is not Role.WORKER or card.model is None:
        return None
    return EventSource(card.model.name, card.name)


def rank_count(card: Instance) -> int:
    """Number of ranks of a holder."""
    if card.role is Role.KVBM:
        return len(card.store.models) if card.store else 0
    return card.capacity.dp_ranks if card.capacity else 1


class Incarnations:
    """Live cards by holder, and the instances whose events are ignored until a new lease."""

    def __init__(self) -> None:
        self._cards: dict[str, Instance] = {}
        self._namesakes: dict[EventSource, dict[str, Instance]] = {}
        self._ignored: dict[str, None] = {}

    def __contains__(self, instance: str) -> bool:
        return instance in self._cards

    @property
    def cards(self) -> list[Instance]:
        return list(self._cards.values())

    @property
    def ignored(self) -> list[str]:
        """Instances that were replaced or whose lease lapsed."""
        return list(self._ignored)

    def card(self, instance: str) -> Instance | None:
        return self._cards.get(instance)

    def add(self, source: EventSource, card: Instance) -> bool:
        """Add or update a lease; returns whether it is new."""
        new = card.instance not in self._cards
        self._cards[card.instance] = card
        self._namesakes.setdefault(source, {})[card.instance] = card
        return new

    def remove(self, source: EventSource, card: Instance) -> bool:
        """Remove a lease; returns whether it existed."""
        namesakes = self._namesakes.get(source, {})
        namesakes.pop(card.instance, None)
        if not namesakes:
            self._namesakes.pop(source, None)
        return self._cards.pop(card.instance, None) is not None

    def newest(self, source: EventSource) -> Instance | None:
        """The current instance of a holder: the live one that started last."""
        namesakes = self._namesakes.get(source, {}).values()
        return max(namesakes, key=lambda card: (card.started, card.instance), default=None)

    def ignore(self, instance: str) -> None:
        """Ignore this instance's events; beyond REMEMBERED, the oldest such entries are dropped."""
        self._ignored[instance] = None
        while len(self._ignored) > REMEMBERED:
            del self._ignored[next(iter(self._ignored))]

    def is_ignored(self, instance: str) -> bool:
        return instance in self._ignored

    def stop_ignoring(self, instance: str) -> None:
        self._ignored.pop(instance, None)

    def forget_ignored(self) -> None:
        self._ignored.clear()
