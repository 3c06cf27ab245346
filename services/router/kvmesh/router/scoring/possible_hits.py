"""Blocks of a prompt that the mesh could have reused, beside those of the chosen rank. Pure."""

import numpy as np

from kvmesh.bus.messages import Candidate, Elsewhere, PossibleHits
from kvmesh.router.scoring.candidates import Candidates
from kvmesh.router.scoring.overlaps import TIERS, Overlaps
from kvmesh.router.state.rank_table import ROLES, RankTable, Serves

COLUMNS = 1 + TIERS


def possible_hits(candidates: Candidates, chosen: Candidate, serves: Serves) -> PossibleHits | None:
    """The blocks that a decision for `chosen` could have had; None without the index's reply.

    `chosen` computes the prompt, and was chosen among the ranks with the role `serves`.
    """
    overlaps = candidates.overlaps
    if overlaps is None:
        return None
    held, best = _longest(overlaps)
    expected = sum(chosen.overlap)
    own = expected
    if candidates.running and own:
        own = min(own, _held_by(chosen, overlaps, candidates.table))
    elsewhere = None
    if held > own:
        key = overlaps.ranks[best]
        reason = _reason(candidates, key.instance, key.rank, serves)
        elsewhere = Elsewhere(instance=key.instance, rank=key.rank, blocks=held, reason=reason)
    return PossibleHits(
        chosen=own,
        running=int(candidates.running),
        elsewhere=elsewhere,
        removals=list(overlaps.removals),
        since=overlaps.since,
    )


def _longest(overlaps: Overlaps) -> tuple[int, int]:
    """The longest overlap of one rank or node in blocks, and its index among the ranks."""
    if not overlaps.rows:
        return 0, 0
    table = np.frombuffer(overlaps.rows, "<u4").reshape(-1, COLUMNS)
    totals = table[:, 1:].sum(axis=1)
    row = int(totals.argmax())
    return int(totals[row]), int(table[row, 0])


def _held_by(chosen: Candidate, overlaps: Overlaps, table: RankTable) -> int:
    """Blocks that the chosen rank or the kvbm of its node holds, without predicted ones."""
    card = table.cards.get(chosen.instance)
    node = table.nodes.number(card.node) if card is not None and card.node else 0
    most = 0
    for number, *tiers in np.frombuffer(overlaps.rows, "<u4").reshape(-1, COLUMNS).tolist():
        key = overlaps.ranks[number]
        own = (key.instance, key.rank) == (chosen.instance, chosen.rank)
        if own or (node and table.nodes.of_kvbm(key.instance) == node):
            most = max(most, sum(tiers))
    return most


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
