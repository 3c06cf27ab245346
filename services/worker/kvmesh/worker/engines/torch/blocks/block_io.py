"""Copies blocks out of and into a running core.

The event loop owns all state; only the copies run in another thread. Blocks being copied are
locked, so their block ids are not reused.
"""

from array import array
from collections.abc import Callable

from kvmesh.bus.messages import KvLayout
from kvmesh.hashing import DIGEST_BYTES
from kvmesh.worker.engines.torch.core import TorchCore


class BlocksRefused(Exception):
    """The blocks cannot be imported; the message is the reason."""


def check_layout(core: TorchCore, layout: KvLayout) -> None:
    """Raise BlocksRefused unless blocks of this layout are interchangeable with the core's."""
    own = core.model.layout
    if layout.weights != own.weights:
        raise BlocksRefused("these blocks were computed by another model")
    if layout != own:
        raise BlocksRefused(f"these blocks have the layout {layout}, not {own}")


def lock_held_prefix(
    core: TorchCore, hashes: "array[int]", fingerprints: bytes
) -> tuple["array[int]", list[int]]:
    """Lock the held part of a prefix; returns its hashes and block ids. Unlock after the copy."""
    matched = core.blocks.match_prefix(hashes).matched
    held = hashes[: core.guard.count_matching(hashes[:matched], fingerprints)]
    core.blocks.lock_prefix(held)
    return held, core.physical_blocks.block_ids(held)


class HeldPrefix:
    """The prefix of a prompt that the engine holds, locked while it grows; `release` unlocks it.

    A block held for other tokens, by the packed `fingerprints` of the prompt, ends the prefix.
    `on_change` is called after changes of the block manager.
    """

    def __init__(
        self,
        core: TorchCore,
        hashes: "array[int]",
        local_hashes: "array[int]",
        fingerprints: bytes,
        salt: int,
        tenant: str,
        on_change: Callable[[], None],
    ) -> None:
        self.hashes = hashes
        self.local_hashes = local_hashes
        self._core = core
        self._fingerprints = fingerprints
        self.held = self._lock()
        self._salt, self._tenant = salt, tenant
        self._on_change = on_change

    def covers(self, blocks: int) -> bool:
        return self.held >= blocks

    def extend(self, minimum: int) -> int:
        """Lock all blocks held now; returns their number, or -1 if less than `minimum`."""
        before = self.held
        self.held = self._lock()
        self._core.blocks.unlock(self.hashes[:before])
        return self.held if self.held >= minimum else -1

    def reserve(self, count: int) -> list[int]:
        """Allocate block ids for the next blocks, as many as are available."""
        core = self._core
        count = min(count, len(self.hashes) - self.held, core.blocks.available)
        core.blocks.allocate(count)
        self._on_change()
        allocatable = min(count, core.physical_blocks.allocatable)
        core.blocks.free_private(count - allocatable)
        return core.physical_blocks.allocate(allocatable)

    def commit(self, block_ids: list[int], valid: int) -> None:
        """Register the first `valid` reserved blocks as the next of the prefix; free the rest."""
        core, first = self._core, self.held
        end = self._usable_end(first + valid)
        valid = end - first
        core.blocks.free_private(len(block_ids) - valid)
        core.physical_blocks.return_unused(block_ids[valid:])
        if valid:
            parent = self.hashes[first - 1] if first else None
            new = slice(first, end)
            core.guard.record(self.hashes[new], self._fingerprints[first * DIGEST_BYTES :])
            core.blocks.promote(
                parent, self._salt, self.hashes[new], self.local_hashes[new], self._tenant
            )
            for sequence_hash, block_id in zip(self.hashes[new], block_ids, strict=False):
                core.physical_blocks.cache_block(sequence_hash, block_id)
            self.held = end
            self._on_change()

    def release(self, priority: int = 0) -> None:
        self._core.blocks.unlock(self.hashes[: self.held], priority)

    def _lock(self) -> int:
        end = self._usable_end(len(self.hashes))
        return self._core.blocks.lock_prefix(self.hashes[:end])

    def _usable_end(self, blocks: int) -> int:
        """Number of leading blocks, `blocks` at most, whose hashes are free of collisions."""
        core = self._core
        held = self.hashes[: core.blocks.match_prefix(self.hashes[:blocks]).matched]
        matching = core.guard.count_matching(held, self._fingerprints)
        if matching < len(held):
            return matching
        new = self.hashes[matching:blocks]
        fingerprints = self._fingerprints[matching * DIGEST_BYTES :]
        return matching + core.guard.count_unclaimed(new, fingerprints)
