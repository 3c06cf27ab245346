"""The nodes whose kvbm keeps blocks in memory, on disk and remotely for the workers beside it."""

from kvmesh.bus.messages import Instance


class KvbmNodes:
    """Numbers the nodes that have a kvbm, from 1 on; 0 stands for all others."""

    def __init__(self) -> None:
        self._node_of: dict[str, str] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def join(self, card: Instance) -> None:
        """Take in the card of a kvbm; one that does not say where it is serves nobody."""
        if card.node:
            self._node_of[card.instance] = card.node
            self._number()

    def leave(self, instance: str) -> bool:
        """Forget a kvbm; False if it was none."""
        known = self._node_of.pop(instance, None) is not None
        self._number()
        return known

    def _number(self) -> None:
        nodes = sorted(set(self._node_of.values()))
        self._numbers = {node: number for number, node in enumerate(nodes, 1)}

    def number(self, node: str) -> int:
        return self._numbers.get(node, 0)

    def of_kvbm(self, instance: str) -> int:
        """The number of a kvbm's node; 0 for whoever is no kvbm."""
        return self.number(self._node_of.get(instance, ""))
