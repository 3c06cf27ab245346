"""A simple reference implementation of the block manager."""

from array import array
from collections import Counter, OrderedDict

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Stored

Change = tuple[str, int, int | None]


class PlainBlocks:
    """`changes` are ("stored", block, parent) and ("removed", block, None), in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self.refs: Counter[int] = Counter()
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.priority: Counter[int] = Counter()
        self.changes: list[Change] = []

    @property
    def contents(self) -> set[int]:
        return {*self.refs, *self.idle}

    @property
    def active(self) -> int:
        return len(self.refs) + self.private

    def match(self, blocks: list[int]) -> tuple[int, int]:
        held = [block in self.contents for block in [*blocks, None]].index(False)
        return held, sum(block in self.idle for block in blocks[:held])

    def use(self, blocks: list[int]) -> None:
        for block in blocks:
            self.idle.pop(block, None)
            self.refs[block] += 1

    def allocate(self, count: int) -> bool:
        if count > self.capacity - self.active:
            return False
        self.evict(self.active + len(self.idle) + count - self.capacity)
        self.private += count
        return True

    def evict(self, count: int) -> None:
        for _ in range(count):
            least = min(self.priority[block] for block in self.idle)
            block = next(b for b in self.idle if self.priority[b] == least)
            del self.idle[block], self.priority[block]
            self.changes.append(("removed", block, None))

    def promote(self, parent: int | None, blocks: list[int]) -> None:
        for block in blocks:
            self.private -= 1
            if block not in self.contents:
                self.changes.append(("stored", block, parent))
            self.use([block])
            parent = block

    def deref(self, blocks: list[int], priority: int) -> None:
        for block in reversed(blocks):
            self.priority[block] = max(self.priority[block], priority)
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                self.idle[block] = None


def changes(events: list[KvEvent]) -> list[Change]:
    """Events as block-by-block changes; a `Cleared` has none."""
    found: list[Change] = []
    for event in events:
        if isinstance(event, Removed):
            found += [("removed", block, None) for block in array("Q", event.engine)]
        elif isinstance(event, Stored):
            blocks = array("Q", event.engine)
            parents = [event.parent, *blocks[:-1]]
            found += [("stored", b, p) for b, p in zip(blocks, parents, strict=True)]
        else:
            assert event == Cleared()
    return found
