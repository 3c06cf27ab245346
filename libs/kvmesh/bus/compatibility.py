"""The choice of the workers that may serve one model together, by their cards.

A prompt is tokenized once, hashed once and then computed by whichever worker is chosen, so all of
them must agree on `FACTS`. What the oldest lease says counts; whoever differs is left out. Everyone
who sees the same cards leaves out the same workers.
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
}
SHOWN = 3


class CardProfile:
    """The statements of some fitting workers, and the workers that make each."""

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
        """The reason why a worker does not fit, in one line with both sides; empty if it does.

        A fact that a card does not state (it is empty or 0) fits any.
        """
        model = card.model
        for fact, words in FACTS.items():
            value = getattr(model, fact)
            stated, names = self._stated.get(_key(fact, card), (value, []))
            if value and value != stated and model is not None:
                others = ", ".join(names[:SHOWN])
                more = len(names) - SHOWN
                others += f" and {more} more" if more > 0 else ""
                return (
                    f"{card.name}: {words} {value} differs from {stated} of {others} ({model.name})"
                )
        return ""


class Compatibility:
    """The workers of one model; `misfits` maps instances that are left out to the reason.

    Those that are draining are not judged, nor do others have to fit them.
    """

    def __init__(self) -> None:
        self._cards: dict[str, Instance] = {}
        self._kinds: Counter[tuple[object, ...]] = Counter()
        self.misfits: dict[str, str] = {}

    def join(self, card: Instance) -> None:
        """Take in the card of a worker, or a change to it."""
        self._forget(card.instance)
        self._cards[card.instance] = card
        self._kinds[_kind(card)] += 1
        self._judge()

    def leave(self, instance: str) -> None:
        """Forget a worker, if it is known."""
        if self._forget(instance):
            self._judge()

    @property
    def cards(self) -> list[Instance]:
        return list(self._cards.values())

    @property
    def fitting(self) -> list[Instance]:
        """The workers that are not left out, the oldest first."""
        fitting = [card for card in self._cards.values() if card.instance not in self.misfits]
        return sorted(fitting, key=_age)

    def _forget(self, instance: str) -> bool:
        card = self._cards.pop(instance, None)
        if card is None:
            return False
        kind = _kind(card)
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
        return True

    def _judge(self) -> None:
        self.misfits = {}
        if len(self._kinds) < 2:  # as nearly always, and there may be thousands
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
    """The workers of all models that are left out, by instance, each with the reason."""
    models: dict[str, Compatibility] = {}
    for card in cards:
        if card.model is not None:
            models.setdefault(card.model.name, Compatibility()).join(card)
    return {name: reason for found in models.values() for name, reason in found.misfits.items()}


def namesakes(card: Instance, cards: Iterable[Instance]) -> list[str]:
    """Other live instances with the name of this one, which is to be that of one process."""
    return sorted(
        other.instance
        for other in cards
        if (other.role, other.name) == (card.role, card.name)
        and other.instance != card.instance
        and not other.draining
    )


def _key(fact: str, card: Instance) -> str:
    """Engines of different kinds share no KV: each kind has a layout of its own."""
    return f"{fact} of {card.engine}" if fact == "kv_layout" else fact


def _kind(card: Instance) -> tuple[object, ...]:
    return card.engine, *(getattr(card.model, fact) for fact in FACTS)


def _age(card: Instance) -> tuple[float, str]:
    return card.started, card.instance
