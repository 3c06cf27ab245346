"""Input and result of a policy: the candidates of a request, and the choice among them."""

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
    """The eligible ranks of one request. Arrays have one entry per candidate, loads in blocks.

    - `prompt`: the prompt's length in blocks;
    - `overlap`: (candidates, tiers); leading blocks that each tier adds to the tiers before it;
    - `prefill`: blocks that wait for or are in prefill;
    - `decode`: active blocks, this request included;
    - `requests`: number of active requests;
    - `preference`: factors of the cost from the request's label preferences, if it has any;
    - `slowness`: relative time for the same work, if ranks are unlike;
    - `answer`: blocks of prefill in the time of the answer at the load of the candidate and median
      speed, if ranks are unlike and that is known;
    - `block_s`: seconds in which a rank of median speed computes a block; 0 if unknown;
    - `overlaps`: the index's reply; `max_decode`: an upper bound of `decode`;
    - `running`: leading blocks that running requests hold or compute on some rank.

    Policies must not write to any of them.
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
    running: float = 0.0
    answer: Floats | None = None
    block_s: float = 0.0

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def capacity(self) -> Floats:
        """KV blocks of each candidate (0: unknown)."""
        return self.table.total_blocks.take(self.slots)

    @property
    def shortage(self) -> Floats | None:
        """KV blocks each candidate is short of for this request; None if none is short.

        A rank of unknown capacity is not short of any.
        """
        table = self.table
        if self.max_decode <= table.min_usable_blocks:
            return None
        shortage: Floats = self.decode - table.usable_blocks.take(self.slots)
        return np.maximum(shortage, ZERO, out=shortage)

    def wait_s(self, shortage: Floats) -> Floats:
        """Seconds until so many blocks of each candidate are free, of the requests before this one.

        A rank frees the blocks that it uses once in the mean time for which requests generate
        (Little's law). inf if that is unknown, or if those requests do not need so many.
        """
        table, before = self.table, np.maximum(self.decode - self.prompt, ZERO)
        freed = np.minimum(before, table.usable_blocks.take(self.slots))
        seconds = table.decode_s * shortage / np.maximum(freed, 1.0)
        if self.slowness is not None:
            seconds *= self.slowness
        never = shortage > (before if table.decode_s else ZERO)
        return np.where(never, inf, seconds)

    def rank(self, index: int) -> Rank:
        """The rank of candidate `index`."""
        return self.table.ranks[int(self.slots[index])]

    def index_of(self, instance: str, rank: int = 0) -> int | None:
        """Index of the candidate that is this rank of an instance; None if it is not eligible."""
        slot = self.table.find_slot(instance, rank)
        if slot is None:
            return None
        at = int(self.slots.searchsorted(slot))
        return at if at < len(self.slots) and self.slots[at] == slot else None


class PolicyChoice(NamedTuple):
    """Index of the chosen candidate, and the cost of each in the policy's own unit."""

    chosen: int
    cost: Floats
    note: str | None = None


def to_wire(candidates: Candidates, choice: PolicyChoice) -> tuple[Candidate, list[Candidate]]:
    """The chosen candidate and the MAX_SHOWN cheapest in order, for the decision."""
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
