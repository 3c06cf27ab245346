"""Selection of the workers that may serve one model together, by their cards.

A prompt is tokenized and hashed once and may be computed by any of the model's workers, so all of
them must agree on `FACTS`. The oldest lease decides; workers that differ are left out. Processes
that see the same cards leave out the same workers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from kvmesh.bus.messages import Instance

FACTS: Mapping[str, str] = {
    "block_size": "block size",
    "hash_version": "hash version",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "config": "config.json",
    "revision": "model revision",
    "kv_layout": "KV layout",
    "context": "context",
    "weights": "digest of the weights",
}
SHOWN = 3


class CardProfile:
    """The facts that some compatible workers state, each with the names of those workers."""

    def __init__(self, cards: Iterable[Instance] = ()) -> None:
        self._stated: dict[str, tuple[object, list[str]]] = {}
        for card in cards:
            self.add(card)

    def add(self, card: Instance) -> None:
        for fact in FACTS:
            value = getattr(card.model, fact)
            if value:
                self._stated.setdefault(_key(fact, card), (value, []))[1].append(card.name)

    def differs(self, card: Instance) -> str:
        """The reason why a worker is incompatible, in one line with both values; empty if it fits.

        A fact that a card does not state (empty or 0) matches every value.
        """
        model = card.model
        for fact, label in FACTS.items():
            value = getattr(model, fact)
            stated, names = self._stated.get(_key(fact, card), (value, []))
            if value and value != stated and model is not None:
                others = ", ".join(names[:SHOWN])
                more = len(names) - SHOWN
                others += f" and {more} more" if more > 0 else ""
                return (
                    f"{card.name}: {label} {value} differs from {stated} of {others} ({model.name})"
                )
        return ""


class Compatibility:
    """The workers of one model; `misfits` maps incompatible instances to the reason.

    Draining workers are not checked, nor are others checked against them.
    """

    def __init__(self) -> None:
        self._cards: dict[str, Instance] = {}
        self._kinds: Counter[tuple[object, ...]] = Counter()
        self.misfits: dict[str, str] = {}

    def join(self, card: Instance) -> None:
        """Add the card of a worker, or replace it."""
        self._remove(card.instance)
        self._cards[card.instance] = card
        self._kinds[_kind(card)] += 1
        self._compare()

    def leave(self, instance: str) -> None:
        """Remove a worker, if it is known."""
        if self._remove(instance):
            self._compare()

    @property
    def cards(self) -> list[Instance]:
        return list(self._cards.values())

    @property
    def fitting(self) -> list[Instance]:
        """The compatible workers, oldest first."""
        fitting = [card for card in self._cards.values() if card.instance not in self.misfits]
        return sorted(fitting, key=_age)

    def _remove(self, instance: str) -> bool:
        card = self._cards.pop(instance, None)
        if card is None:
            return False
        kind = _kind(card)
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
        return True

    def _compare(self) -> None:
        self.misfits = {}
        if len(self._kinds) < 2:  # nearly always, and there may be thousands of cards
            return
        profile = CardProfile()
        for card in sorted(self._cards.values(), key=_age):
            if card.draining:
                continue
            reason = profile.differs(card)
            if reason:
                self.misfits[card.instance] = reason
            else:
                profile.add(card)


def misfits(cards: Iterable[Instance]) -> dict[str, str]:
    """The incompatible workers of all models: instance to reason."""
    models: dict[str, Compatibility] = {}
    for card in cards:
        if card.model is not None:
            models.setdefault(card.model.name, Compatibility()).join(card)
    return {name: reason for found in models.values() for name, reason in found.misfits.items()}


def namesakes(card: Instance, cards: Iterable[Instance]) -> list[str]:
    """Other live instances with the name of this one; names must be unique."""
    return sorted(
        other.instance
        for other in cards
        if (other.role, other.name) == (card.role, card.name)
        and other.instance != card.instance
        and not other.draining
    )


def _key(fact: str, card: Instance) -> str:
    """Engines of different kinds share no KV, so `kv_layout` is compared within a kind."""
    return f"{fact} of {card.engine}" if fact == "kv_layout" else fact


def _kind(card: Instance) -> tuple[object, ...]:
    return card.engine, *(getattr(card.model, fact) for fact in FACTS)


def _age(card: Instance) -> tuple[float, str]:
    return card.started, card.instance
