"""Nodes with which nothing of a model can be shared, as their blocks are laid out differently."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from kvmesh.blocks.layout import divided
from kvmesh.bus.messages import Instance

log = logging.getLogger(__name__)
Layouts = Mapping[str, Sequence[str]]


class Divisions:
    """Compares the cards of other kvbms with what this one has; each division is logged once."""

    def __init__(self) -> None:
        self._models: dict[str, set[str]] = {}

    def compare(self, ours: Layouts, card: Instance) -> None:
        """`ours` are the layouts of this node's workers by model, in words."""
        theirs = card.store.layouts if card.store is not None else {}
        found = set(divided(ours, theirs))
        for model in sorted(found - self._models.get(card.instance, set())):
            log.warning(
                "no blocks of %s are shared with %s: here %s; there %s",
                model,
                card.instance,
                " or ".join(ours[model]),
                " or ".join(theirs[model]),
            )
        self._models[card.instance] = found

    def leave(self, card: Instance) -> None:
        self._models.pop(card.instance, None)

    @property
    def nodes(self) -> Counter[str]:
        """By model, with how many other nodes nothing is shared."""
        return Counter(model for models in self._models.values() for model in models)
