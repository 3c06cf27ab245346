"""Simulated lower tiers and KV transfers between workers, for the mock engine and the simulator."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvmesh.settings.schema import MockSettings
from kvmesh.worker.enginecore.block_manager import DEFAULTS, BlockManager
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.retention_request import NO_RETENTION, RetentionRequest
from kvmesh.worker.enginecore.sequence import Sequence

HOST, DISK = 1, 2
TIERS = range(4)


class Link:
    """A path for KV blocks of `bytes_per_s`; transfers queue behind each other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, now: float, size: float) -> float:
        """The time at which a transfer of `size` bytes, requested at `now`, ends."""
        self._free_at = max(now, self._free_at) + size / self.bytes_per_s
        return self._free_at


class LowerTier(BlockManager):
    """A tier for the blocks of sequences that leave the engine; evicts by the engine's rules."""

    written = 0

    def store(self, sequence: Sequence, priority: int) -> None:
        """Store the blocks that a sequence holds, as many from the root as fit."""
        request = sequence.request
        hashes = sequence.sequence_hashes[: min(sequence.full_blocks, self.capacity)]
        held = self.lock_prefix(hashes)
        new = slice(held, len(hashes))
        if held < len(hashes):
            self.allocate(len(hashes) - held, request.id)
            parent = hashes[held - 1] if held else None
            local = sequence.local_hashes[new]
            self.promote(parent, request.salt, hashes[new], local, request.tenant)
            self.written += len(hashes) - held
        self.retention.claim(
            hashes, request.retention.for_other_tier if request.retention else None, self.now
        )
        self.unlock(hashes, priority)


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Sizes in blocks and bytes, bandwidths in bytes per second; a tier of 0 blocks does not exist.

    The defaults are the KV of a 32-layer model with 8 KV heads of 128 in 16 bits, over a PCIe link,
    a fast local disk and a 64 GB/s network.
    """

    host_blocks: int = 0
    disk_blocks: int = 0
    bytes_per_token: int = 131072
    host_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = 6e9
    remote_bytes_per_s: float = 64e9


def tier_options(mock: MockSettings) -> TierOptions:
    """Tier options of `[mock]`."""
    return TierOptions(
        host_blocks=mock.host_blocks,
        disk_blocks=mock.disk_blocks,
        bytes_per_token=mock.kv_bytes_per_token,
        host_bytes_per_s=mock.host_bytes_per_s,
        disk_bytes_per_s=mock.disk_bytes_per_s,
        remote_bytes_per_s=mock.transfer_bytes_per_s,
    )


class TierMatch:
    """Blocks of a prefix that need not be computed, by tier.

    `kvbm_queried`: a kvbm was queried for more; the sequence is notified once they have arrived.
    """

    __slots__ = ("disk", "engine", "host", "kvbm_queried", "remote")

    def __init__(
        self, engine: int, host: int, disk: int, remote: int, kvbm_queried: bool = False
    ) -> None:
        self.engine = engine
        self.host = host
        self.disk = disk
        self.remote = remote
        self.kvbm_queried = kvbm_queried

    @property
    def loadable(self) -> int:
        return self.host + self.disk + self.remote

    def first(self, count: int) -> "TierMatch":
        """The first `count` blocks below the engine."""
        host = min(self.host, count)
        return TierMatch(self.engine, host, min(self.disk, count - host), 0)

    def tokens(self, block_size: int) -> list[int]:
        """Tokens by tier number, up to the last tier with any."""
        tiers = [self.engine, self.host, self.disk, self.remote]
        while len(tiers) > 1 and not tiers[-1]:
            tiers.pop()
        return [blocks * block_size for blocks in tiers]


class SimulatedTiers:
    """Finds blocks that the engine does not hold, and schedules their transfers.

    `blocks` are the engine's. `lower` are the tiers of this rank, nearest first; `loaded` counts
    blocks requested from each. `has_kvbm()` returns whether there is a kvbm.
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
        """True if hash `first` is the first block of another tenant's prompt in a lower tier."""
        return any(tier.is_foreign(first, tenant) for tier in self.lower)

    def match_prefix(self, reusable: "array[int]", hits: int, remote: int = 0) -> TierMatch:
        """Find the blocks of a prefix by tier.

        The engine holds the first `hits`; the first `remote` can come by handoff, which leaves the
        kvbm aside.
        """
        queried = hits < len(reusable) and not remote and self._has_kvbm()
        if not self.lower and not remote:
            return TierMatch(hits, 0, 0, 0, queried)
        below = [0] * len(TIERS)
        at = hits
        for tier in self.lower:
            held = tier.match_prefix(reusable).matched
            if held > at:
                below[tier.tier] = held - at
                at = held
        at_remote = max(0, min(remote, len(reusable)) - at)
        return TierMatch(hits, below[HOST], below[DISK], at_remote, queried)

    def load(self, match: TierMatch, now: float) -> float:
        """Start the transfers of `match`; return the time at which the last one ends.

        Blocks from disk pass through host memory and use both links at once.
        """
        ready_at = math.inf if match.kvbm_queried else now
        for link, size in self._link_bytes(match):
            ready_at = max(ready_at, link.reserve(now, size))
        self.loaded[HOST] += match.host
        self.loaded[DISK] += match.disk
        return ready_at

    def load_seconds(self, match: TierMatch) -> float:
        """The duration of the transfers of `match` over idle links."""
        return max((size / link.bytes_per_s for link, size in self._link_bytes(match)), default=0.0)

    def _link_bytes(self, match: TierMatch) -> list[tuple[Link, int]]:
        """Bytes over each link in use."""
        blocks = (match.host + match.disk, match.disk, match.remote)
        return [(k, n * self.block_bytes) for k, n in zip(self._links, blocks, strict=True) if n]

    # retention

    def record_prompt(self, request: RetentionRequest, prompt: "array[int]", now: float) -> None:
        """Record a session's newest prompt in each tier; see `RetentionManager.record_prompt`."""
        for tier in self.lower:
            tier.now = now
            tier.retention.record_prompt(request, prompt, now)

    def store(self, sequence: Sequence, priority: int, now: float) -> None:
        """Store a sequence that leaves the engine's memory in each tier."""
        for tier in self.lower:
            tier.now = now
            tier.store(sequence, priority)

    def hand_over_retention(self, prefix: "array[int]", tenant: str, to: BlockManager) -> None:
        """Copy the claims on loaded, locked blocks from the lower tiers to block manager `to`."""
        for tier in self.lower:
            segments = tier.retention.retained_segments(prefix, to.now)
            if segments:
                request = replace(NO_RETENTION, segments=segments, tenant=tenant)
                to.retention.claim_inherited(prefix, request, to.now)
