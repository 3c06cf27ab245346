"""The KV events of a node's tiers, gathered until they are taken."""

from array import array
from collections import defaultdict
from collections.abc import Iterable

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Stored
from kvmesh.kvbm.core.blocks.block import Block


class _Run:
    """Consecutive blocks that came to a tier, or blocks that left it."""

    def __init__(self, tier: int, stored: bool, first: Block) -> None:
        self.tier = tier
        self.stored = stored
        self.first = first
        self.last = first
        self.names = array("Q")
        self.locals = array("Q")

    def takes(self, tier: int, stored: bool, block: Block) -> bool:
        if (tier, stored) != (self.tier, self.stored):
            return False
        return not stored or (block.index > 0 and block.previous == self.last.sequence)

    def add(self, block: Block) -> None:
        self.names.append(block.name)
        self.locals.append(block.local)
        self.last = block

    def event(self) -> KvEvent:
        names = self.names.tobytes()
        if not self.stored:
            return Removed(self.tier, names)
        first = self.first
        previous = first.previous if first.index else None
        salt = 0 if first.index else first.salt
        return Stored(self.tier, None, names, self.locals.tobytes(), salt, previous)


class EventLog:
    """Per model what was stored and removed, in order; neighbours are told together."""

    def __init__(self) -> None:
        self._runs: defaultdict[int, list[_Run]] = defaultdict(list)

    def stored(self, tier: int, block: Block) -> None:
        self._tell(tier, True, block)

    def removed(self, tier: int, block: Block) -> None:
        self._tell(tier, False, block)

    def take(self) -> dict[int, list[KvEvent]]:
        """What was told since the last call, by rank."""
        taken = {rank: [run.event() for run in runs] for rank, runs in self._runs.items() if runs}
        self._runs.clear()
        return taken

    def _tell(self, tier: int, stored: bool, block: Block) -> None:
        runs = self._runs[block.space.rank]
        if not runs or not runs[-1].takes(tier, stored, block):
            runs.append(_Run(tier, stored, block))
        runs[-1].add(block)


def dump(rank: int, blocks: Iterable[Block]) -> list[KvEvent]:
    """All registered copies of a rank's blocks, after a `Cleared`."""
    log = EventLog()
    held = sorted((b for b in blocks if b.space.rank == rank), key=lambda block: block.index)
    by_previous = {(tier, b.previous): b for b in held for tier in b.copies if b.ready(tier)}
    told: set[tuple[int, bytes]] = set()
    for block in held:
        for tier in sorted(block.copies):
            step: Block | None = block if block.ready(tier) else None
            while step is not None and (tier, step.digest) not in told:
                told.add((tier, step.digest))
                log.stored(tier, step)
                step = by_previous.get((tier, step.sequence))
    return [Cleared(None), *log.take().get(rank, [])]
