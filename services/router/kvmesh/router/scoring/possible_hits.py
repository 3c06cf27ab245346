"""Blocks of a prompt that the mesh could have reused, beside those of the chosen rank. Pure."""

import numpy as np
from numpy.typing import NDArray

from kvmesh.bus.messages import Candidate, Elsewhere, PossibleHits, RankKey
from kvmesh.router.scoring.candidates import Candidates
from kvmesh.router.scoring.overlaps import TIERS
from kvmesh.router.state.arrays import highest
from kvmesh.router.state.rank_table import ROLES, RankTable, Serves

COLUMNS = 1 + TIERS
_ALL = np.ones(TIERS, np.uint32)


def possible_hits(candidates: Candidates, chosen: Candidate, serves: Serves) -> PossibleHits | None:
    """The blocks that a decision for `chosen` could have had; None without the index's reply.

    `chosen` computes the prompt, and was chosen among the ranks with the role `serves`.
    """
    overlaps = candidates.overlaps
    if overlaps is None:
        return None
    rows = np.frombuffer(overlaps.rows, "<u4").reshape(-1, COLUMNS)
    totals = rows[:, 1:].dot(_ALL)  # faster than a sum of few columns
    held = int(highest(totals))
    expected = sum(chosen.overlap)
    own = expected
    if candidates.running and own:
        ours = _are_of(chosen, overlaps.ranks, candidates.table)[rows[:, 0]]
        own = min(own, int(highest(totals[ours])))
    elsewhere = None
    if held > own:
        key = overlaps.ranks[int(rows[totals.argmax(), 0])]
        reason = _reason(candidates, key.instance, key.rank, serves)
        elsewhere = Elsewhere(instance=key.instance, rank=key.rank, blocks=held, reason=reason)
    return PossibleHits(
        chosen=own,
        running=int(candidates.running),
        elsewhere=elsewhere,
        removals=list(overlaps.removals),
        since=overlaps.since,
    )


def _are_of(chosen: Candidate, ranks: list[RankKey], table: RankTable) -> NDArray[np.bool_]:
    """True for the chosen rank and the kvbm of its node, for each of `ranks`."""
    card = table.cards.get(chosen.instance)
    node = table.nodes.number(card.node) if card is not None and card.node else 0
    slots = table.slots_of_keys(ranks)
    own: NDArray[np.bool_] = slots == table.slot_of.get((chosen.instance, chosen.rank), -1)
    return own | (slots == table.size + node) if node else own


def _reason(candidates: Candidates, instance: str, rank: int, serves: Serves) -> str:
    """The reason why a rank that holds more was not chosen, as in `Elsewhere`."""
    table, request = candidates.table, candidates.request
    if instance in request.placement.exclude:
        return "excluded"
    if table.nodes.of_kvbm(instance):
        return "load"
    card, slot = table.cards.get(instance), table.find_slot(instance, rank)
    if card is None or slot is None:
        return "gone"
    if card.draining:
        return "draining"
    if card.serves not in ROLES[serves]:
        return "role"
    if slot not in table.eligible(request.placement, request.adapter, serves):
        return "constraints"
    at = candidates.index_of(instance, rank)
    if at is None:
        return "busy" if serves == "all" else "load"
    shortage = candidates.shortage
    return "room" if shortage is not None and shortage[at] > 0 else "load"
