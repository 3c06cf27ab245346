"""The mock engine's side of the tiers of its node: what it tells them, and the blocks it loads."""

from array import array
from typing import Protocol

from kvmesh.bus.messages import Retain, owner
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.retention_request import inherited_retention
from kvmesh.worker.enginecore.sequence import Sequence


class NodeTiers(Protocol):
    """The kvbm of a node, as the core of an engine uses it."""

    @property
    def available(self) -> bool:
        """True if sequences wait for blocks from there, until `MockCore.finish_loading`."""
        ...

    @property
    def load_ratio(self) -> float:
        """The time to load a block from there over the time to compute it; 0 if unknown."""
        ...

    def on_filled(self, sequence: Sequence) -> None:
        """Called when blocks of a sequence are full by the end of the step in progress."""
        ...

    def on_prompt(self, sequence: Sequence) -> None:
        """Called when the prompt of a sequence is computed by the end of the step in progress."""
        ...


class OnboardedPrefix:
    """The prefix of a prompt that an engine holds, locked while loaded blocks extend it.

    `hashes` and `local` are those of the blocks that may come from a cache.
    """

    def __init__(self, blocks: BlockManager, sequence: Sequence) -> None:
        request = sequence.request
        reusable = sequence.reusable
        foreign = reusable and blocks.is_foreign(reusable[0], request.tenant)
        self.hashes: array[int] = reusable[:0] if foreign else reusable
        self.local: array[int] = sequence.local_hashes[: len(self.hashes)]
        self._blocks = blocks
        self._salt, self._tenant = request.salt, request.tenant
        self.held = blocks.lock_prefix(self.hashes)

    def covers(self, blocks: int) -> bool:
        return self.held >= blocks

    def extend(self, minimum: int) -> int:
        """Lock all blocks held now; returns their number, or -1 if less than `minimum`."""
        before, self.held = self.held, self._blocks.lock_prefix(self.hashes)
        self._blocks.unlock(self.hashes[:before])
        return self.held if self.held >= minimum else -1

    def reserve(self, count: int) -> int:
        """Allocate the next blocks, as many of `count` as are available; return their number."""
        count = max(0, min(count, len(self.hashes) - self.held, self._blocks.available))
        self._blocks.allocate(count)
        return count

    def commit(self, reserved: int, valid: int) -> None:
        """Promote the first `valid` reserved blocks as the next of the prefix; free the rest."""
        first, blocks = self.held, self._blocks
        if valid and blocks.is_foreign(self.hashes[0], self._tenant):
            valid = 0
        blocks.free_private(reserved - valid)
        if not valid:
            return
        parent, new = self.hashes[first - 1] if first else None, slice(first, first + valid)
        blocks.promote(parent, self._salt, self.hashes[new], self.local[new], self._tenant)
        self.held = first + valid

    def inherit(self, retention: list[Retain], block_size: int) -> None:
        """Apply the claims that loaded blocks bring along; `retention` is in tokens."""
        if retention:
            claims = inherited_retention(retention, block_size, owner(self._tenant))
            held = self.hashes[: self.held]
            self._blocks.retention.claim_inherited(held, claims, self._blocks.now)

    def release(self) -> None:
        self._blocks.unlock(self.hashes[: self.held])


def retained(sequence: Sequence) -> list[Retain]:
    """The retention that a request asks for, in tokens."""
    claims, size = sequence.request.retention, sequence.block_size
    return [
        Retain(
            segment.first * size,
            None if segment.end is None else segment.end * size,
            segment.wish.level,
            segment.wish.ttl_s,
        )
        for segment in (claims.segments if claims is not None else ())
    ]
