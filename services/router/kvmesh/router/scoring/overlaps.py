"""What the index says about a prompt, joined with what is predicted, and when to doubt it."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from kvmesh import _native
from kvmesh.bus.messages import OverlapReply, RankKey
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.arrays import Floats, Slots
from kvmesh.router.state.rank_table import RankTable

TIERS = 4


class Overlaps(NamedTuple):
    """The index's answer for one prompt: rows of five uint32, the first a place in `ranks`."""

    ranks: list[RankKey]
    rows: bytes

    @classmethod
    def of(cls, reply: OverlapReply, prompt: int = 0) -> "Overlaps":
        return cls(reply.ranks, reply.rows[prompt])


def gather(
    table: RankTable,
    slots: Slots,
    overlaps: Overlaps | None,
    predicted: Floats | None,
    shared: Floats,
    blocks: int,
) -> tuple[Floats, Floats, float]:
    """What some slots hold of a prompt of `blocks` blocks, and what they carry.

    By slot, `predicted` blocks count as the engine's own (tier 0), and `shared` ones, which active
    requests hold, need no more room. Returns for each of `slots` a row of TIERS: the blocks that
    the tier adds to those before it, of the rank or its node's kvbm, whichever reach further; and
    three rows: blocks in prefill, blocks to decode with if the prompt came too, and requests;
    and the most blocks to decode with of any.
    """
    rows = b""
    places: Slots | bytes = b""
    if overlaps is not None and overlaps.rows:
        rows, places = overlaps.rows, table.places(overlaps.ranks)
    overlap, loads = np.empty((len(slots), TIERS)), np.empty((3, len(slots)))
    nodes = len(table.nodes)
    most = _native.gather(
        overlap,
        loads,
        slots,
        table.loaded,
        table.node_of_slot() if nodes else b"",
        nodes,
        rows,
        places,
        b"" if predicted is None else predicted,
        shared,
        blocks,
        table.block_size,
    )
    return overlap, loads, most


class OverlapWatch:
    """Notices that an index finds nothing where something must be: broken KV events.

    A prompt whose first block was sent before, more than `settle` seconds ago, should overlap
    somewhere. It is `broken` while `enough` such prompts in a row did not.
    """

    def __init__(self, settle: float = 10.0, enough: int = 20, remembered: int = 4096) -> None:
        self._settle = settle
        self._enough = enough
        self._remembered = remembered
        self._first_seen: OrderedDict[bytes, float] = OrderedDict()
        self._misses = 0

    @property
    def broken(self) -> bool:
        return self._misses >= self._enough

    def look(self, sequence: bytes, found: bool, now: float) -> None:
        """Take note of one answer of the index."""
        if found or not sequence:
            self._misses = 0 if found else self._misses
            return
        seen = self._first_seen.setdefault(sequence[:HASH_BYTES], now)
        if len(self._first_seen) > self._remembered:
            self._first_seen.popitem(last=False)
        if now - seen >= self._settle:
            self._misses += 1
