"""KV events of a node's tiers, buffered until they are published.

Of blocks in parts, only the lead has events (`KvLayout.part`).
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Stored
from kvmesh.kvbm.core.blocks.block import Block, DropCause


class _Run:
    """Blocks of one event: a chain stored in a tier, or with `cause` blocks removed from it."""

    def __init__(self, tier: int, cause: DropCause | None, first: Block) -> None:
        self.tier = tier
        self.cause = cause
        self.first = first
        self.last = first
        self.event_hashes = array("Q")
        self.local_hashes = array("Q")

    def accepts(self, tier: int, cause: DropCause | None, block: Block) -> bool:
        if (tier, cause) != (self.tier, self.cause):
            return False
        if cause is not None:
            return True
        return block.index > 0 and block.parent_hash == self.last.sequence_hash

    def add(self, block: Block) -> None:
        self.event_hashes.append(block.event_hash)
        self.local_hashes.append(block.local_hash)
        self.last = block

    def event(self) -> KvEvent:
        event_hashes = self.event_hashes.tobytes()
        if self.cause is not None:
            return Removed(self.tier, event_hashes, *self.cause)
        first = self.first
        parent_hash = first.parent_hash if first.index else None
        salt = 0 if first.index else first.salt
        local_hashes = self.local_hashes.tobytes()
        return Stored(self.tier, None, event_hashes, local_hashes, salt, parent_hash)


class EventLog:
    """Stored and removed blocks per rank, in order; consecutive blocks share an event."""

    def __init__(self) -> None:
        self._runs: defaultdict[int, list[_Run]] = defaultdict(list)

    def stored(self, tier: int, block: Block) -> None:
        self._append(tier, None, block)

    def removed(self, tier: int, block: Block, cause: DropCause) -> None:
        self._append(tier, cause, block)

    def drain(self) -> dict[int, list[KvEvent]]:
        """The events since the last call, by rank."""
        events = {rank: [run.event() for run in runs] for rank, runs in self._runs.items() if runs}
        self._runs.clear()
        return events

    def _append(self, tier: int, cause: DropCause | None, block: Block) -> None:
        if not block.space.is_lead:
            return
        runs = self._runs[block.space.rank]
        if not runs or not runs[-1].accepts(tier, cause, block):
            runs.append(_Run(tier, cause, block))
        runs[-1].add(block)


def dump(rank: int, blocks: Iterable[Block]) -> list[KvEvent]:
    """All registered copies of a rank's blocks, after a `Cleared`."""
    log = EventLog()
    of_rank = (b for b in blocks if b.space.rank == rank and b.space.is_lead)
    held = sorted(of_rank, key=lambda block: block.index)
    by_parent = {(tier, b.parent_hash): b for b in held for tier in b.copies if b.registered(tier)}
    logged: set[tuple[int, bytes]] = set()
    for block in held:
        for tier in sorted(block.copies):
            step: Block | None = block if block.registered(tier) else None
            while step is not None and (tier, step.digest) not in logged:
                logged.add((tier, step.digest))
                log.stored(tier, step)
                step = by_parent.get((tier, step.sequence_hash))
    return [Cleared(None), *log.drain().get(rank, [])]
