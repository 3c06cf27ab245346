"""What a policy sees of one request and its candidates, and what it answers."""

from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kvmesh.bus.messages import Candidate, RouteRequest
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.router.state.arrays import ZERO, Floats, Slots
from kvmesh.router.state.rank_table import Rank, RankTable

MAX_SHOWN = 16
_cost_of = attrgetter("cost")


@dataclass(slots=True, eq=False)
class Candidates:
    """The eligible ranks of one request. Arrays hold one entry per candidate, loads in blocks.

    `prompt` is the prompt's length in blocks. `overlap` has a row per candidate and a column per
    tier: the leading blocks that the tier adds beyond the tiers before it. `prefill` is what is
    being prefilled there already; `decode` the blocks active there if this request came too;
    `requests` the number of active requests; `total` the blocks of the rank (0: unknown).
    `preference` scales the cost of each candidate, if the request prefers some. `slowness` is how
    long each takes for the same work, beside the others, if some are far from them.
    `overlaps` is the index's answer as it came; `most` is at least the highest `decode`. Policies
    must not write to any of it.
    """

    request: RouteRequest
    now: float
    prompt: float
    slots: Slots
    overlap: Floats
    prefill: Floats
    decode: Floats
    requests: Floats
    table: RankTable
    overlaps: Overlaps | None = None
    preference: Floats | None = None
    max_decode: float = inf
    slowness: Floats | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def capacity(self) -> Floats:
        return self.table.total_blocks.take(self.slots)

    @property
    def shortage(self) -> Floats | None:
        """Blocks that each candidate lacks for this request beside what it runs; None: no one any.

        A rank whose number of blocks is unknown lacks none.
        """
        table = self.table
        if self.max_decode <= table.min_usable_blocks:
            return None
        shortage: Floats = self.decode - table.usable_blocks.take(self.slots)
        return np.maximum(shortage, ZERO, out=shortage)

    def rank(self, index: int) -> Rank:
        """Who candidate `index` is."""
        return self.table.ranks[int(self.slots[index])]

    def index_of(self, instance: str, rank: int = 0) -> int | None:
        """The candidate that is this data-parallel rank of an instance, if it is eligible."""
        slot = self.table.find_slot(instance, rank)
        if slot is None:
            return None
        at = int(self.slots.searchsorted(slot))
        return at if at < len(self.slots) and self.slots[at] == slot else None


class PolicyChoice(NamedTuple):
    """The chosen candidate and what each one would have cost, in the policy's own unit."""

    chosen: int
    cost: Floats
    note: str | None = None


def to_wire(candidates: Candidates, choice: PolicyChoice) -> tuple[Candidate, list[Candidate]]:
    """The chosen one, then the cheapest ones in order."""
    chosen, rank_of = choice.chosen, candidates.table.ranks.__getitem__
    facts = [
        candidates.slots,
        candidates.overlap,
        candidates.prefill,
        candidates.decode,
        candidates.requests,
        choice.cost,
    ]
    if len(candidates) > MAX_SHOWN:
        few = np.append(choice.cost.argpartition(MAX_SHOWN)[:MAX_SHOWN], chosen)
        facts = [fact.take(few, 0) for fact in facts]
        chosen = MAX_SHOWN
    facts[1] = facts[1].astype(np.int64)
    slots, *columns = [fact.tolist() for fact in facts]
    shown = [
        Candidate(
            instance=instance,
            worker=worker,
            rank=rank,
            overlap=overlap,
            prefill=prefill,
            decode=decode,
            requests=int(requests),
            cost=cost,
        )
        for (instance, worker, rank), overlap, prefill, decode, requests, cost in zip(
            map(rank_of, slots), *columns, strict=True
        )
    ]
    return shown[chosen], sorted(shown[:MAX_SHOWN], key=_cost_of)
