"""Overlaps from the index joined with predictions and loads; detection of a broken index."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmesh import _native
from kvmesh.bus.messages import OverlapReply, RankKey, Removal
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.arrays import Floats, Slots
from kvmesh.router.state.rank_table import RankTable

TIERS = 4


class Overlaps(NamedTuple):
    """The index's reply for one prompt.

    `rows` are rows of five uint32: an index into `ranks`, and the blocks that each tier adds.
    `removals` and `since` are as in `OverlapReply`.
    """

    ranks: list[RankKey]
    rows: bytes
    removals: Sequence[Removal] = ()
    since: float = 0.0

    @classmethod
    def of(cls, reply: OverlapReply, prompt: int = 0) -> "Overlaps":
        removals = reply.removals[prompt] if reply.removals else []
        return cls(reply.ranks, reply.rows[prompt], removals, reply.since)


def gather(
    table: RankTable,
    slots: Slots,
    overlaps: Overlaps | None,
    predicted: Floats | None,
    shared: Floats,
    blocks: int,
) -> tuple[Floats, Floats, float]:
    """Overlaps and loads of some slots for a prompt of `blocks` blocks.

    `predicted` and `shared` are leading blocks by slot: predicted ones count as held by the engine
    (tier 0), those that active requests share need no further capacity. Returns
    - a (slots, TIERS) array: blocks that each tier adds to those before it, of the rank or of its
      node's kvbm, whichever reaches further; none of the node where loading takes as long as
      computing, since such blocks are computed;
    - a (3, slots) array: blocks in prefill, active blocks with this prompt, active requests;
    - the largest number of active blocks with this prompt.
    """
    rows = b""
    row_slots: Slots | bytes = b""
    if overlaps is not None and overlaps.rows:
        rows, row_slots = overlaps.rows, table.slots_of_keys(overlaps.ranks)
    overlap, loads = np.empty((len(slots), TIERS)), np.empty((3, len(slots)))
    nodes = len(table.nodes) > 0
    max_decode = _native.gather(
        overlap,
        loads,
        slots,
        table.load_memory,
        table.node_of_slot() if nodes else b"",
        table.nodes.groups if nodes else b"",
        rows,
        row_slots,
        b"" if predicted is None else predicted,
        shared,
        blocks,
        table.block_size,
    )
    if table.loads_measured:
        computes = table.load_ratio.take(slots) >= 1
        if computes.any():
            overlap[computes, 1:] = 0
    return overlap, loads, max_decode


class OverlapWatch:
    """Detects an index without overlaps for known prompts: broken KV events.

    A prompt whose first block was placed more than `settle_s` seconds ago should overlap on some
    rank. The index is `broken` while `threshold` such prompts in a row do not.
    """

    def __init__(
        self, settle_s: float = 10.0, threshold: int = 20, max_prompts: int = 4096
    ) -> None:
        self._settle_s = settle_s
        self._threshold = threshold
        self._max_prompts = max_prompts
        self._first_seen: OrderedDict[bytes, float] = OrderedDict()
        self._misses = 0

    @property
    def broken(self) -> bool:
        return self._misses >= self._threshold

    def observe(self, sequence_hashes: bytes, found: bool, now: float) -> None:
        """Record one reply of the index."""
        if found or not sequence_hashes:
            self._misses = 0 if found else self._misses
            return
        first = self._first_seen.setdefault(sequence_hashes[:HASH_BYTES], now)
        if len(self._first_seen) > self._max_prompts:
            self._first_seen.popitem(last=False)
        if now - first >= self._settle_s:
            self._misses += 1
