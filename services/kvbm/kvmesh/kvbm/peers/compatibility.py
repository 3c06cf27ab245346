"""Nodes with which nothing of a model can be shared: they lay blocks out or name them otherwise."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from kvmesh.bus.messages import Instance, incompatible_models

log = logging.getLogger(__name__)
Layouts = Mapping[str, Sequence[str]]


class PeerCompatibility:
    """Compares the cards of other kvbms with what this one has; each division is logged once.

    `key` is the fingerprint of this node's key.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._models: dict[str, set[str]] = {}
        self._strangers: set[str] = set()

    def compare(self, ours: Layouts, card: Instance) -> None:
        """`ours` are the layouts of this node's workers by model, in words."""
        if card.store is None:
            return
        self._compare_keys(card.instance, card.store.key)
        self._compare_layouts(ours, card.instance, card.store.layouts)

    def _compare_keys(self, instance: str, theirs: str) -> None:
        if theirs in ("", self._key):
            self._strangers.discard(instance)
        elif instance not in self._strangers:
            self._strangers.add(instance)
            log.warning(
                "no blocks are shared with %s: its kvbm.key is another "
                "(fingerprint here %s; there %s)",
                instance,
                self._key,
                theirs,
            )

    def _compare_layouts(self, ours: Layouts, instance: str, theirs: Layouts) -> None:
        found = set(incompatible_models(ours, theirs))
        for model in sorted(found - self._models.get(instance, set())):
            log.warning(
                "no blocks of %s are shared with %s: here %s; there %s",
                model,
                instance,
                " or ".join(ours[model]),
                " or ".join(theirs[model]),
            )
        self._models[instance] = found

    def leave(self, card: Instance) -> None:
        self._models.pop(card.instance, None)
        self._strangers.discard(card.instance)

    @property
    def nodes(self) -> Counter[str]:
        """By model, with how many other nodes nothing is shared as their layouts differ."""
        return Counter(model for models in self._models.values() for model in models)

    @property
    def strangers(self) -> int:
        """With how many other nodes nothing at all is shared, as their keys differ."""
        return len(self._strangers)
