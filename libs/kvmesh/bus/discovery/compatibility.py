"""Selection of the workers that may serve one model together, by their cards.

A prompt is tokenized and hashed once and may be computed by any of the model's workers, so all of
them must agree on `FACTS`. The oldest lease decides; workers that differ are left out. Processes
that see the same cards leave out the same workers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeAlias

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
Kind: TypeAlias = tuple[object, ...]
Age: TypeAlias = tuple[float, str]


class CardProfile:
    """The facts that some compatible workers state, each with the names of those workers."""

    def __init__(self, cards: Iterable[Instance] = ()) -> None:
        self._stated: dict[str, tuple[object, dict[str, str]]] = {}  # names by instance
        for card in cards:
            self.add(card)

    def add(self, card: Instance) -> None:
        for fact in FACTS:
            value = getattr(card.model, fact)
            if value:
                names = self._stated.setdefault(_key(fact, card), (value, {}))[1]
                names[card.instance] = card.name

    def remove(self, card: Instance) -> None:
        """Remove a card, if it was added; another one must state the same facts."""
        for fact in FACTS:
            _, names = self._stated.get(_key(fact, card), (None, {}))
            names.pop(card.instance, None)

    def differs(self, card: Instance) -> str:
        """The reason why a worker is incompatible, in one line with both values; empty if it fits.

        A fact that a card does not state (empty or 0) matches every value.
        """
        model = card.model
        for fact, label in FACTS.items():
            value = getattr(model, fact)
            stated, names = self._stated.get(_key(fact, card), (value, {}))
            if value and value != stated and model is not None:
                others = ", ".join(islice(names.values(), SHOWN))
                more = len(names) - SHOWN
                others += f" and {more} more" if more > 0 else ""
                return (
                    f"{card.name}: {label} {value} differs from {stated} of {others} ({model.name})"
                )
        return ""


class Compatibility:
    """The workers of one model; `misfits` maps incompatible instances to the reason.

    A reason names some of the workers that state otherwise.

    Draining workers are not checked, nor are others checked against them. Cards of one kind state
    the same facts, so the oldest one decides for all of its kind.
    """

    def __init__(self) -> None:
        self._cards: dict[str, Instance] = {}
        self._kinds: Counter[Kind] = Counter()
        self._profile: CardProfile | None = None  # None while there is one kind
        self._oldest: dict[Kind, Age] = {}  # of those that were compared
        self.misfits: dict[str, str] = {}

    def join(self, card: Instance) -> None:
        """Add the card of a worker, or replace it."""
        known, kind = self._remove(card.instance), _kind(card)
        self._cards[card.instance] = card
        self._kinds[kind] += 1
        if known is not None and _compared(known) == _compared(card):
            return
        oldest = self._oldest.get(kind)
        if known is None and oldest is not None and oldest < _age(card):
            if not card.draining:
                self._judge(card)
            return
        self._compare()

    def leave(self, instance: str) -> None:
        """Remove a worker, if it is known."""
        card = self._remove(instance)
        if card is None:
            return
        kind = _kind(card)
        decided = bool(self.misfits) and self._oldest.get(kind) == _age(card)
        if self._profile is None or kind not in self._kinds or decided:
            self._compare()
        else:
            self.misfits.pop(instance, None)
            self._profile.remove(card)

    @property
    def cards(self) -> list[Instance]:
        return list(self._cards.values())

    @property
    def fitting(self) -> list[Instance]:
        """The compatible workers, oldest first."""
        fitting = [card for card in self._cards.values() if card.instance not in self.misfits]
        return sorted(fitting, key=_age)

    def _remove(self, instance: str) -> Instance | None:
        card = self._cards.pop(instance, None)
        if card is not None:
            kind = _kind(card)
            self._kinds[kind] -= 1
            if not self._kinds[kind]:
                del self._kinds[kind]
        return card

    def _compare(self) -> None:
        """Compare all cards, of which there may be thousands."""
        self.misfits, self._oldest, self._profile = {}, {}, None
        if len(self._kinds) < 2:  # nearly always
            return
        self._profile = CardProfile()
        for card in sorted(self._cards.values(), key=_age):
            if not card.draining:
                self._oldest.setdefault(_kind(card), _age(card))
                self._judge(card)

    def _judge(self, card: Instance) -> None:
        """Compare a card with older ones."""
        assert self._profile is not None
        reason = self._profile.differs(card)
        if reason:
            self.misfits[card.instance] = reason
        else:
            self._profile.add(card)


def misfits(cards: Iterable[Instance]) -> dict[str, str]:
    """The incompatible workers of all models: instance to reason."""
    models: dict[str, Compatibility] = {}
    for card in sorted(cards, key=_age):
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


def _kind(card: Instance) -> Kind:
    return card.engine, *(getattr(card.model, fact) for fact in FACTS)


def _age(card: Instance) -> Age:
    return card.started, card.instance


def _compared(card: Instance) -> tuple[Kind, Age, bool]:
    return _kind(card), _age(card), card.draining
