"""Nodes with a kvbm, which holds blocks in memory, on disk and remotely for its node's workers."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvmesh.bus.messages import Instance, NodeStore
from kvmesh.router.state.arrays import Slots


class KvbmNodes:
    """Numbers the nodes with a kvbm from 1; nodes without a kvbm are 0.

    `groups` has a number for each node, from 1 on: nodes of one group can load each other's blocks
    of `model`. The group of a node that shares no blocks is 0.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._cards: dict[str, Instance] = {}
        self._numbers: dict[str, int] = {}
        self.groups: Slots = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def join(self, card: Instance) -> None:
        """Add or update a kvbm's card; a card without a node is ignored."""
        if card.node:
            self._cards[card.instance] = card
            self._number()

    def leave(self, instance: str) -> bool:
        """Remove a kvbm; returns whether the instance was one."""
        known = self._cards.pop(instance, None) is not None
        self._number()
        return known

    def _number(self) -> None:
        stores = {card.node: card.store for card in self._cards.values()}
        self._numbers = {node: number for number, node in enumerate(sorted(stores), 1)}
        self.groups = _groups([stores[node] for node in self._numbers], self._model)

    def cards_of(self, node: str) -> list[Instance]:
        """The cards of a node's kvbms."""
        return [card for card in self._cards.values() if card.node == node]

    def number(self, node: str) -> int:
        return self._numbers.get(node, 0)

    def of_kvbm(self, instance: str) -> int:
        """The number of a kvbm's node; 0 if the instance is not a kvbm."""
        card = self._cards.get(instance)
        return 0 if card is None else self.number(card.node)


def _groups(stores: list[NodeStore | None], model: str) -> Slots:
    """Nodes with one key of block digests and the same layouts share blocks; without a key, none.

    A node that lists no layout has no worker of the model now. It counts to the largest group with
    its key.
    """
    names = [_group(store, model) for store in stores]
    sizes = Counter(name for name in names if name is not None and name[1])
    largest: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, _ in sizes.most_common():
        largest.setdefault(name[0], name)
    joined = [name if name is None or name[1] else largest.get(name[0], name) for name in names]
    numbers: Mapping[object, int] = {
        name: number for number, name in enumerate(dict.fromkeys(filter(None, joined)), 1)
    }
    return np.array([numbers.get(name, 0) for name in joined], np.int64)


def _group(store: NodeStore | None, model: str) -> tuple[str, tuple[str, ...]] | None:
    if store is None or not store.key:
        return None
    return store.key, tuple(store.layouts.get(model, ()))
