"""Nodes that cannot share blocks with this one, because their keys or layouts differ."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from kvmesh.bus.messages import Instance, incompatible_models

log = logging.getLogger(__name__)
Layouts = Mapping[str, Sequence[str]]


class PeerCompatibility:
    """Compares the cards of other kvbms with this node; logs each incompatibility once.

    `key` is the fingerprint of this node's key.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._models: dict[str, set[str]] = {}
        self._other_keys: set[str] = set()

    def compare(self, ours: Layouts, card: Instance) -> None:
        """`ours` are the summaries of the layouts of this node's workers, by model."""
        if card.store is None:
            return
        self._compare_keys(card.instance, card.store.key)
        self._compare_layouts(ours, card.instance, card.store.layouts)

    def _compare_keys(self, instance: str, theirs: str) -> None:
        if theirs in ("", self._key):
            self._other_keys.discard(instance)
        elif instance not in self._other_keys:
            self._other_keys.add(instance)
            log.warning(
                "no blocks are shared with %s: its kvbm.key differs "
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

    def remove(self, card: Instance) -> None:
        """Forget a node that has left."""
        self._models.pop(card.instance, None)
        self._other_keys.discard(card.instance)

    @property
    def incompatible_layouts(self) -> Counter[str]:
        """Number of other nodes, by model, that share no layout of it with this node."""
        return Counter(model for models in self._models.values() for model in models)

    @property
    def incompatible_keys(self) -> int:
        """Number of other nodes that share no blocks at all because their keys differ."""
        return len(self._other_keys)
