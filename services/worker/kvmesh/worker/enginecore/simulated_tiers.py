"""KV that is not computed here: tiers that keep what sequences leave, and other workers."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvmesh.settings.schema import MockSettings
from kvmesh.worker.enginecore.block_manager import DEFAULTS, BlockManager
from kvmesh.worker.enginecore.retention import RetentionOptions
from kvmesh.worker.enginecore.retention_request import NO_RETENTION
from kvmesh.worker.enginecore.sequence import Sequence

HOST, DISK = 1, 2
TIERS = range(4)


class Link:
    """A path for KV blocks: transfers queue up behind each other at `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, now: float, size: float) -> float:
        """When a transfer of `size` bytes that is asked for at `now` will have arrived."""
        self._free_at = max(now, self._free_at) + size / self.bytes_per_s
        return self._free_at


class LowerTier(BlockManager):
    """What sequences leave behind, by the same rules as in the engine's own memory."""

    written = 0

    def store(self, sequence: Sequence, worth: int) -> None:
        """Keep the blocks that a sequence holds, as many from the root as fit."""
        request, hashes = (
            sequence.request,
            sequence.sequence_hashes[: min(sequence.full_blocks, self.capacity)],
        )
        held = self.lock_prefix(hashes)
        new = slice(held, len(hashes))
        if held < len(hashes):
            self.allocate(len(hashes) - held)
            parent = hashes[held - 1] if held else None
            local = sequence.local_hashes[new]
            self.promote(parent, request.salt, hashes[new], local, request.tenant)
            self.written += len(hashes) - held
        self.retention.claim(
            hashes, request.retention.for_other_tier if request.retention else None, self.now
        )
        self.unlock(hashes, worth)


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Sizes in blocks and bytes, bandwidths in bytes per second; without blocks, no such tier.

    The default is the KV of a 32-layer model with 8 KV heads of 128 in 16 bits, over a PCIe link,
    a fast local disk and a 64 GB/s network.
    """

    host_blocks: int = 0
    disk_blocks: int = 0
    bytes_per_token: int = 131072
    host_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = 6e9
    remote_bytes_per_s: float = 64e9


def tier_options(mock: MockSettings) -> TierOptions:
    """What the settings say."""
    return TierOptions(
        host_blocks=mock.host_blocks,
        disk_blocks=mock.disk_blocks,
        bytes_per_token=mock.kv_bytes_per_token,
        host_bytes_per_s=mock.host_bytes_per_s,
        disk_bytes_per_s=mock.disk_bytes_per_s,
        remote_bytes_per_s=mock.transfer_bytes_per_s,
    )


class TierMatch:
    """Blocks of a prefix that can be had without computing them, by where they are.

    `kvbm_queried`: a kvbm is asked for more, and the sequence is told when that has come.
    """

    __slots__ = ("disk", "engine", "host", "kvbm_queried", "remote")

    def __init__(self, engine: int, host: int, disk: int, remote: int, asked: bool = False) -> None:
        self.engine = engine
        self.host = host
        self.disk = disk
        self.remote = remote
        self.kvbm_queried = asked

    @property
    def loadable(self) -> int:
        return self.host + self.disk + self.remote

    def first(self, count: int) -> "TierMatch":
        """The first `count` of the blocks below alone."""
        host = min(self.host, count)
        return TierMatch(self.engine, host, min(self.disk, count - host), 0)

    def tokens(self, block_size: int) -> list[int]:
        """Tokens by tier number, up to the last tier that has any."""
        tiers = [self.engine, self.host, self.disk, self.remote]
        while len(tiers) > 1 and not tiers[-1]:
            tiers.pop()
        return [blocks * block_size for blocks in tiers]


class SimulatedTiers:
    """Finds what the engine does not hold, and tells when it will be here.

    `blocks` are the engine's. `lower` are the tiers of this rank alone, the nearest first; `loaded`
    counts the blocks that were sent for there, by tier. `askable` tells whether there is a kvbm.
    """

    def __init__(
        self,
        options: TierOptions,
        block_size: int,
        speedup: float,
        blocks: BlockManager,
        has_kvbm: Callable[[], bool] = lambda: False,
        retention: RetentionOptions = DEFAULTS,
    ) -> None:
        self._has_kvbm = has_kvbm
        sizes = ((HOST, options.host_blocks), (DISK, options.disk_blocks))
        self.lower = [LowerTier(size, retention, tier, blocks) for tier, size in sizes if size]
        self.block_bytes = block_size * options.bytes_per_token
        self.loaded = [0] * len(TIERS)
        self._links = [
            Link(speed * speedup)
            for speed in (
                options.host_bytes_per_s,
                options.disk_bytes_per_s,
                options.remote_bytes_per_s,
            )
        ]

    def is_foreign(self, first: int, tenant: str) -> bool:
        """Whether a tier has another tenant's prompt that begins with a block with this hash."""
        return any(tier.is_foreign(first, tenant) for tier in self.lower)

    def match_prefix(self, reusable: "array[int]", hits: int, remote: int = 0) -> TierMatch:
        """Where the blocks of a prefix are, `hits` leading ones being in the engine."""
        asked = hits < len(reusable) and self._has_kvbm()
        if not self.lower and not remote:
            return TierMatch(hits, 0, 0, 0, asked)
        below = [0] * len(TIERS)
        at = hits
        for tier in self.lower:
            held = tier.match_prefix(reusable).matched
            if held > at:
                below[tier.tier] = held - at
                at = held
        far = max(0, min(remote, len(reusable)) - at)
        return TierMatch(hits, below[HOST], below[DISK], far, asked)

    def load(self, found: TierMatch, now: float) -> float:
        """Begin the transfers that `found` asks for; returns when the last one has arrived.

        What is on the disk comes through the host's memory, both links being used at once.
        """
        ready_at = math.inf if found.kvbm_queried else now
        for link, size in self._link_bytes(found):
            ready_at = max(ready_at, link.reserve(now, size))
        self.loaded[HOST] += found.host
        self.loaded[DISK] += found.disk
        return ready_at

    def load_seconds(self, found: TierMatch) -> float:
        """How long those transfers take, should nothing else be on the links."""
        return max((size / link.bytes_per_s for link, size in self._link_bytes(found)), default=0.0)

    def _link_bytes(self, found: TierMatch) -> list[tuple[Link, int]]:
        """Bytes over each link that is used."""
        blocks = (found.host + found.disk, found.disk, found.remote)
        return [(k, n * self.block_bytes) for k, n in zip(self._links, blocks, strict=True) if n]

    # what is kept

    def record_prompt(self, session: str | None, prompt: "array[int]", now: float) -> None:
        """As in `Keeping`."""
        for tier in self.lower:
            tier.now = now
            tier.retention.record_prompt(session, prompt, now)

    def store(self, sequence: Sequence, worth: int, now: float) -> None:
        """A sequence leaves the engine's memory."""
        for tier in self.lower:
            tier.now = now
            tier.store(sequence, worth)

    def hand_over_retention(self, prefix: "array[int]", tenant: str, to: BlockManager) -> None:
        """Blocks that the engine has taken in, and refers to, are kept there as they were here."""
        for tier in self.lower:
            kept = tier.retention.retained_segments(prefix, to.now)
            if kept:
                asked = replace(NO_RETENTION, segments=kept, tenant=tenant)
                to.retention.claim_inherited(prefix, asked, to.now)
