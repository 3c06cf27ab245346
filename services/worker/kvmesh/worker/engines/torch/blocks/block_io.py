"""Blocks that leave a core or come into it while it works.

Books are kept on the event loop; the copy in between is for another thread. What is on its way is
referred to, so that nobody else gets its place.
"""

from array import array
from collections.abc import Callable

from kvmesh.blocks.digests import DIGEST_BYTES
from kvmesh.blocks.layout import KvLayout
from kvmesh.worker.engines.torch.core import TorchCore


class BlocksRefused(Exception):
    """These blocks cannot be taken; the message says why."""


def check_layout(core: TorchCore, layout: KvLayout) -> None:
    """Raise BlocksRefused unless blocks laid out like this are as good as the core's own."""
    own = core.model.layout
    if layout.weights != own.weights:
        raise BlocksRefused("these blocks were computed by another model")
    if layout != own:
        raise BlocksRefused(f"these blocks have the layout {layout}, not {own}")


def hold(core: TorchCore, hashes: "array[int]", prints: bytes) -> tuple["array[int]", list[int]]:
    """Refer to what is held of a prefix; also where that is. To be dereferred after the copy."""
    matched = core.blocks.match_prefix(hashes).matched
    held = hashes[: core.guard.sound(hashes[:matched], prints)]
    core.blocks.lock_prefix(held)
    return held, core.slots.places(held)


class Prefix:
    """The part of a prompt that is in the engine, referred to while it grows; to be released.

    `prints` are those of its blocks, packed; what is held for other tokens ends it. `told` is
    called when the books have changed.
    """

    def __init__(
        self,
        core: TorchCore,
        hashes: "array[int]",
        local: "array[int]",
        prints: bytes,
        salt: int,
        tenant: str,
        told: Callable[[], None],
    ) -> None:
        self.hashes = hashes
        self.local = local
        self._core = core
        self._prints = prints
        self.held = self._use()
        self._salt, self._tenant = salt, tenant
        self._told = told

    def reaches(self, blocks: int) -> bool:
        return self.held >= blocks

    def extend(self, least: int) -> int:
        """Refer to all that is held now; -1 if that is less than `least`."""
        before = self.held
        self.held = self._use()
        self._core.blocks.unlock(self.hashes[:before])
        return self.held if self.held >= least else -1

    def reserve(self, count: int) -> list[int]:
        """Places for the next blocks, as many as there is room for."""
        core = self._core
        count = min(count, len(self.hashes) - self.held, core.blocks.available)
        core.blocks.allocate(count)
        self._told()
        ready = min(count, core.slots.ready)
        core.blocks.free_private(count - ready)
        return core.slots.take(ready)

    def fill(self, places: list[int], good: int) -> None:
        """The first `good` reserved places hold the blocks that follow; the others are free."""
        core, first = self._core, self.held
        end = self._end(first + good)
        good = end - first
        core.blocks.free_private(len(places) - good)
        core.slots.give_back(places[good:])
        if good:
            parent = self.hashes[first - 1] if first else None
            new = slice(first, end)
            core.guard.note(self.hashes[new], self._prints[first * DIGEST_BYTES :])
            core.blocks.promote(parent, self._salt, self.hashes[new], self.local[new], self._tenant)
            for block, place in zip(self.hashes[new], places, strict=False):
                core.slots.keep(block, place)
            self.held = end
            self._told()

    def release(self, priority: int = 0) -> None:
        self._core.blocks.unlock(self.hashes[: self.held], priority)

    def _use(self) -> int:
        end = self._end(len(self.hashes))
        return self._core.blocks.lock_prefix(self.hashes[:end])

    def _end(self, blocks: int) -> int:
        """Where what is held of the first blocks is that of other tokens; else after them."""
        core = self._core
        held = self.hashes[: core.blocks.match_prefix(self.hashes[:blocks]).matched]
        sound = core.guard.sound(held, self._prints)
        if sound < len(held):
            return sound
        fresh, prints = self.hashes[sound:blocks], self._prints[sound * DIGEST_BYTES :]
        return sound + core.guard.free(fresh, prints)
