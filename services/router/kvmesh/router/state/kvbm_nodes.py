"""Nodes with a kvbm, which holds blocks in memory, on disk and remotely for its node's workers."""

from kvmesh.bus.messages import Instance


class KvbmNodes:
    """Numbers the nodes with a kvbm from 1; nodes without a kvbm are 0."""

    def __init__(self) -> None:
        self._node_of: dict[str, str] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def join(self, card: Instance) -> None:
        """Add a kvbm's card; a card without a node is ignored."""
        if card.node:
            self._node_of[card.instance] = card.node
            self._number()

    def leave(self, instance: str) -> bool:
        """Remove a kvbm; returns whether the instance was one."""
        known = self._node_of.pop(instance, None) is not None
        self._number()
        return known

    def _number(self) -> None:
        nodes = sorted(set(self._node_of.values()))
        self._numbers = {node: number for number, node in enumerate(nodes, 1)}

    def number(self, node: str) -> int:
        return self._numbers.get(node, 0)

    def of_kvbm(self, instance: str) -> int:
        """The number of a kvbm's node; 0 if the instance is not a kvbm."""
        return self.number(self._node_of.get(instance, ""))
