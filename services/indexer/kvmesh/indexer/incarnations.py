"""Which instance of each holder counts: pure bookkeeping of leases and of instances that are gone.

Of several live instances with one worker's, or one kvbm's, name the one that started last counts.
"""

from kvmesh.bus.messages import Instance, Role
from kvmesh.indexer.decoding import EventSource

REMEMBERED = 4096
ANY_MODEL = ""  # a kvbm holds blocks of several models, each under a rank of its own


def source_of_card(card: Instance) -> EventSource | None:
    """Whose events a card's instance publishes; None unless it holds blocks."""
    if card.role is Role.KVBM:
        return EventSource(ANY_MODEL, card.name)
    if card.role is not Role.WORKER or card.model is None:
        return None
    return EventSource(card.model.name, card.name)


def rank_count(card: Instance) -> int:
    """How many ranks a holder has."""
    if card.role is Role.KVBM:
        return len(card.store.models) if card.store else 0
    return card.capacity.dp_ranks if card.capacity else 1


class Incarnations:
    """Live cards by holder, and the instances whose events are ignored until they come back."""

    def __init__(self) -> None:
        self._cards: dict[str, Instance] = {}
        self._namesakes: dict[EventSource, dict[str, Instance]] = {}
        self._gone: dict[str, None] = {}

    def __contains__(self, instance: str) -> bool:
        return instance in self._cards

    @property
    def cards(self) -> list[Instance]:
        return list(self._cards.values())

    @property
    def gone(self) -> list[str]:
        """Instances that were replaced, or lapsed and are not back."""
        return list(self._gone)

    def card(self, instance: str) -> Instance | None:
        return self._cards.get(instance)

    def add(self, source: EventSource, card: Instance) -> bool:
        """Note a lease; returns whether it is a new one."""
        new = card.instance not in self._cards
        self._cards[card.instance] = card
        self._namesakes.setdefault(source, {})[card.instance] = card
        return new

    def remove(self, source: EventSource, card: Instance) -> bool:
        """Note the end of a lease; returns whether it was known."""
        namesakes = self._namesakes.get(source, {})
        namesakes.pop(card.instance, None)
        if not namesakes:
            self._namesakes.pop(source, None)
        return self._cards.pop(card.instance, None) is not None

    def newest(self, source: EventSource) -> Instance | None:
        """The live instance of a holder that counts."""
        namesakes = self._namesakes.get(source, {}).values()
        return max(namesakes, key=lambda card: (card.started, card.instance), default=None)

    def dismiss(self, instance: str) -> None:
        """Ignore what this instance publishes; the longest dismissed are forgotten in the end."""
        self._gone[instance] = None
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def is_gone(self, instance: str) -> bool:
        return instance in self._gone

    def recall(self, instance: str) -> None:
        self._gone.pop(instance, None)

    def forget_gone(self) -> None:
        self._gone.clear()
