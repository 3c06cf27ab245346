"""What the index says about a prompt, joined with what is predicted, and when to doubt it."""

import logging
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from kvmesh.bus.messages import OverlapReply, RankKey
from kvmesh.router.arrays import Floats
from kvmesh.router.prefixes import HASH
from kvmesh.router.workers import RankTable

log = logging.getLogger(__name__)
TIERS = 4


class Overlaps(NamedTuple):
    """The index's answer for one prompt: rows of five uint32, the first a place in `ranks`."""

    ranks: list[RankKey]
    rows: bytes

    @classmethod
    def of(cls, reply: OverlapReply, prompt: int = 0) -> "Overlaps":
        return cls(reply.ranks, reply.rows[prompt])


def overlap_by_slot(
    table: RankTable, overlaps: Overlaps | None, predicted: Floats | None
) -> Floats:
    """A row per slot, a column per tier: the blocks that the tier adds to those before it.

    Predicted blocks count as the engine's own (tier 0); lower tiers add what lies beyond. Those of
    a worker are its own and those of its node's kvbm, whichever reach further.
    """
    overlap = np.zeros((TIERS, table.size + 1 + len(table.nodes)))
    own = overlap[:, : table.size]
    lower = False
    if overlaps is not None and overlaps.rows:
        found = np.frombuffer(overlaps.rows, "<u4").reshape(-1, 1 + TIERS).T
        places = table.places(overlaps.ranks).take(found[0])
        lower = bool(np.count_nonzero(found[2:]))
        for tier in range(TIERS if lower else 1):
            overlap[tier].put(places, found[1 + tier])
    if not lower:
        if predicted is not None:
            np.maximum(own[0], predicted, out=own[0])
        return own.T
    reach = own.cumsum(0)
    if predicted is not None:
        np.maximum(reach, predicted, out=reach)
    if table.nodes:
        nodes = _reach_of_nodes(overlap[:, table.size :])
        np.maximum(reach, nodes.take(table.node_of_slot(), 1), out=reach)
    return np.diff(reach, axis=0, prepend=0.0).T


def _reach_of_nodes(added: Floats) -> Floats:
    """Leading blocks up to each tier of each node; number 0 is for workers whose node has no kvbm.

    What one node has, any other can read: that counts as its remote tier.
    """
    reach: Floats = added.cumsum(0)
    reach[-1, 1:] = reach[-1, 1:].max()
    reach[:, 0] = 0
    return reach


class OverlapWatch:
    """Notices that an index finds nothing where something must be: broken KV events.

    A prompt whose first block was sent before, more than `settle` seconds ago, should overlap
    somewhere. When `enough` such prompts in a row do not, that is said once, loudly.
    """

    def __init__(self, settle: float = 10.0, enough: int = 20, remembered: int = 4096) -> None:
        self._settle = settle
        self._enough = enough
        self._remembered = remembered
        self._first_seen: OrderedDict[bytes, float] = OrderedDict()
        self._misses = 0

    def look(self, model: str, sequence: bytes, found: bool, now: float) -> bool:
        """Take note of one answer of the index; True when the warning was given."""
        if found or not sequence:
            self._misses = 0 if found else self._misses
            return False
        seen = self._first_seen.setdefault(sequence[:HASH], now)
        if len(self._first_seen) > self._remembered:
            self._first_seen.popitem(last=False)
        if now - seen < self._settle:
            return False
        self._misses += 1
        if self._misses != self._enough:
            return False
        log.warning(
            "the index found nothing for %d prompts of %s in a row that begin like earlier ones: "
            "KV events are lost, disabled, or hashed with another block size or salt",
            self._misses,
            model,
        )
        return True
