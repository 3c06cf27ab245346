"""Selection of the workers that may serve one model together, by their cards.

A prompt is tokenized and hashed once and may be computed by any of the model's workers, so all of
them must agree on `FACTS`. The workers that serve decide, by the statements of routers and
frontends; without one, the oldest by the server's record. Workers that differ are left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from heapq import nlargest
from itertools import islice
from typing import TypeAlias

from msgspec.structs import replace

from kvmesh.bus.messages import Instance, ModelCard, Role, Settled, encode

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
    "task": "task",
}
SHOWN = 3
WITNESSES = frozenset((Role.ROUTER, Role.FRONTEND))
MAX_KINDS = 8  # settled ones of a model
DIGEST_BYTES = 8
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


class Statements:
    """The statements of routers and frontends, without those of the process `own`."""

    def __init__(self, cards: Iterable[Instance] = (), own: str = "") -> None:
        self._own = own
        self._cards: dict[str, Instance] = {}
        for card in cards:
            self.joined(card)

    def joined(self, card: Instance) -> None:
        if card.role in WITNESSES and card.instance != self._own:
            self._cards[card.instance] = card

    def left(self, card: Instance) -> None:
        self._cards.pop(card.instance, None)

    def of(self, model: str) -> Settled | None:
        """The statement of the oldest process that serves the model; None if there is none."""
        for card in sorted(self._cards.values(), key=_age):
            for settled in card.settled:
                if settled.model == model:
                    return settled
        return None


class Compatibility:
    """The workers of one model; `misfits` maps incompatible instances to the reason.

    A reason names some of the workers that state otherwise.

    Draining workers are not checked, nor are others checked against them. Cards of one kind state
    the same facts, so the oldest one decides for all of its kind. Workers of a `settled` kind come
    before all others, as long as there are any: a router or frontend has settled the kinds that it
    serves, so that no card of another kind shuts them out, whatever its age.
    """

    def __init__(self, settled: Settled | None = None) -> None:
        self._cards: dict[str, Instance] = {}
        self._kinds: Counter[Kind] = Counter()
        self._profile: CardProfile | None = None  # None while there is one kind
        self._oldest: dict[Kind, Age] = {}  # of those that were compared
        self._changed = True
        self.settled = settled
        self.misfits: dict[str, str] = {}

    def adopt(self, settled: Settled | None) -> None:
        """Take what others have settled."""
        self.settled = settled
        self._compare()

    def settle(self) -> None:
        """Settle the kinds that serve now; without any, the former ones remain settled."""
        if not self._changed:
            return
        self._changed = False
        serving = [card for card in self.fitting if not card.draining and card.model is not None]
        if not serving or serving[0].model is None:
            return
        names: dict[Kind, set[str]] = {}
        for card in serving:
            names.setdefault(_kind(card), set()).add(card.name)
        kinds = nlargest(MAX_KINDS, names, key=lambda kind: len(names[kind]))  # else the oldest
        model = serving[0].model
        self.settled = Settled(model.name, [_digest(kind) for kind in kinds], card_digest(model))

    def join(self, card: Instance) -> None:
        """Add the card of a worker, or replace it."""
        known, kind = self._remove(card.instance), _kind(card)
        self._cards[card.instance] = card
        self._kinds[kind] += 1
        self._changed = True
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
        self._changed = True
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
    def names(self) -> set[str]:
        """The names of the workers, of which one process may have many instances."""
        return {card.name for card in self._cards.values()}

    @property
    def fitting(self) -> list[Instance]:
        """The compatible workers: first those with the settled card, the oldest first."""
        fitting = [card for card in self._cards.values() if card.instance not in self.misfits]
        preferred = self.settled.card if self.settled is not None else ""
        first: ModelCard | None = None  # nearly all cards are equal

        def order(card: Instance) -> tuple[bool, bool, Age]:
            nonlocal first
            if first is None and card.model is not None and card_digest(card.model) == preferred:
                first = card.model
            other = card.model != first and (
                card.model is None
                or first is None
                or replace(card.model, adapters=first.adapters) != first
            )
            return other, card.draining, _age(card)

        return sorted(fitting, key=order)

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
        settled = self.settled.kinds if self.settled is not None else []
        later = {kind: _digest(kind) not in settled for kind in self._kinds}
        for card in sorted(self._cards.values(), key=lambda card: (later[_kind(card)], _age(card))):
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
    """The incompatible workers of all models: instance to reason.

    The cards of routers and frontends say what is settled.
    """
    cards = list(cards)
    statements, models = Statements(cards), dict[str, Compatibility]()
    for card in sorted(cards, key=_age):
        if card.model is not None:
            name = card.model.name
            if name not in models:
                models[name] = Compatibility(statements.of(name))
            models[name].join(card)
    return {name: reason for found in models.values() for name, reason in found.misfits.items()}


def card_digest(model: ModelCard) -> str:
    """Digest of a model card, without its adapters."""
    return blake2b(encode(replace(model, adapters=[])), digest_size=DIGEST_BYTES).hexdigest()


@lru_cache(1024)
def _digest(kind: Kind) -> str:
    return blake2b(encode(kind), digest_size=DIGEST_BYTES).hexdigest()


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
