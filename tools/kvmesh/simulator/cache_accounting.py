"""What could have been cached of each prompt, and what was, on the way to the engine."""

from math import isnan
from struct import Struct

from kvmesh.bus.messages import Decision
from kvmesh.router.scoring.overlaps import TIERS, Overlaps
from kvmesh.simulator.records import Records
from kvmesh.workload.analysis.sharing import InfiniteCache
from kvmesh.workload.model import Workload

_ROWS = Struct(f"<{1 + TIERS}I")


class CacheAccounting:
    """Fills the columns `ideal`, `made`, `best` and `held` of the records, in tokens.

    An endless cache for all has what was computed: `ideal` when the prompt itself is, `made` at the
    time of its placement; of that, some rank had `best` then, and the chosen one `held`.
    """

    def __init__(self, workload: Workload, records: Records, block_size: int) -> None:
        self._rounds = workload.rounds
        self._records = records
        self._size = block_size
        self._made = InfiniteCache(workload.tree, block_size)

    def placed(self, index: int, decision: Decision, overlaps: Overlaps | None) -> None:
        """A first token came of an earlier placement: this one does not count."""
        round_, records = self._rounds[index], self._records
        if not isnan(records.first[index]):
            return
        records.made[index] = self._made.hit(round_.branch, round_.input_tokens)
        records.best[index] = records.held[index] = 0
        if overlaps is None:
            return
        chosen = decision.prefill or decision.chosen
        for place, *tiers in _ROWS.iter_unpack(overlaps.rows):
            tokens = sum(tiers) * self._size
            if tokens > records.best[index]:
                records.best[index] = tokens
            rank = overlaps.ranks[place]
            if rank.instance == chosen.instance and rank.rank == chosen.rank:
                records.held[index] = tokens

    def computed(self, index: int) -> None:
        """The prompt is in some engine's memory."""
        round_ = self._rounds[index]
        self._records.ideal[index] = self._made.add(round_.branch, round_.input_tokens)

    def ended(self, index: int, generated: int) -> None:
        """So is the answer, but for its last token."""
        round_ = self._rounds[index]
        self._made.add(round_.answer, round_.input_tokens + generated - 1)
