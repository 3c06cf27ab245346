"""Prompt tokens that each request could have found cached, from its placement to its prefill."""

from math import isnan
from struct import Struct

from kvmesh.bus.messages import Decision
from kvmesh.router.scoring.overlaps import TIERS, Overlaps
from kvmesh.simulator.records import Records
from kvmesh.workload.analysis.sharing import InfiniteCache
from kvmesh.workload.model import Workload

_ROWS = Struct(f"<{1 + TIERS}I")


class CacheAccounting:
    """Fills the columns `ideal`, `computed`, `best_rank` and `chosen_rank` of the records.

    All are numbers of cached leading tokens of the prompt: `computed` and `ideal` in an infinite
    cache shared by all workers, at the placement and at the end of the prefill; `best_rank` and
    `chosen_rank` on the rank with the longest overlap and on the chosen rank, at the placement.
    `kvbm_of` maps a worker's instance to that of the kvbm whose blocks it can load.
    """

    def __init__(self, workload: Workload, records: Records, block_size: int) -> None:
        self._rounds = workload.rounds
        self._records = records
        self._size = block_size
        self.kvbm_of: dict[str, str] = {}
        self._infinite_cache = InfiniteCache(workload.tree, block_size)

    def on_placed(self, index: int, decision: Decision, overlaps: Overlaps | None) -> None:
        """Record the overlaps at a placement; later attempts after the first token are ignored."""
        round_, records = self._rounds[index], self._records
        if not isnan(records.first_token[index]):
            return
        records.computed[index] = self._infinite_cache.hit(round_.branch, round_.input_tokens)
        records.best_rank[index] = records.chosen_rank[index] = 0
        if overlaps is None:
            return
        chosen = decision.prefill or decision.chosen
        kvbm = self.kvbm_of.get(chosen.instance)
        for number, *tiers in _ROWS.iter_unpack(overlaps.rows):
            tokens = sum(tiers) * self._size
            if tokens > records.best_rank[index]:
                records.best_rank[index] = tokens
            rank = overlaps.ranks[number]
            own = rank.instance == chosen.instance and rank.rank == chosen.rank
            if own or rank.instance == kvbm:
                records.chosen_rank[index] = max(records.chosen_rank[index], tokens)

    def on_prefilled(self, index: int) -> None:
        """Add the prompt, which an engine has computed, to the infinite cache."""
        round_ = self._rounds[index]
        self._records.ideal[index] = self._infinite_cache.add(round_.branch, round_.input_tokens)

    def on_finished(self, index: int, generated: int) -> None:
        """Add the output to the infinite cache; the KV of its last token is never computed."""
        round_ = self._rounds[index]
        self._infinite_cache.add(round_.output_branch, round_.input_tokens + generated - 1)
