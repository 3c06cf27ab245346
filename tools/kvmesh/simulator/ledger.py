"""What could have been cached of each prompt, and what was, on the way from arrival to engine."""

from math import isnan

from kvmesh.bus.messages import Decision, RankKey
from kvmesh.router.overlaps import TIERS, Overlaps
from kvmesh.simulator.records import Records
from kvmesh.workload.model import Workload
from kvmesh.workload.sharing import InfiniteCache

NOWHERE = -1


class Ledger:
    """Fills the columns `ideal`, `made`, `best` and `held` of the records, in tokens.

    An endless cache for all has what was asked for (`ideal`) or what was computed by the time of
    the placement (`made`); of that, some rank had `best` then, and the chosen one `held`.
    """

    def __init__(self, workload: Workload, records: Records, block_size: int) -> None:
        self._rounds = workload.rounds
        self._records = records
        self._size = block_size
        self._asked = InfiniteCache(workload.tree, block_size)
        self._made = InfiniteCache(workload.tree, block_size)
        self._ranks: list[RankKey] = []
        self._places: dict[tuple[str, int], int] = {}

    def arrived(self, index: int) -> None:
        round_ = self._rounds[index]
        self._records.ideal[index] = self._asked.hit(round_.branch, round_.input_tokens)
        self._asked.add(round_.branch, round_.input_tokens)

    def placed(self, index: int, decision: Decision, overlaps: Overlaps | None) -> None:
        """A first token came of an earlier placement: this one does not count."""
        round_, records = self._rounds[index], self._records
        if not isnan(records.first[index]):
            return
        records.made[index] = self._made.hit(round_.branch, round_.input_tokens)
        records.best[index] = records.held[index] = 0
        if overlaps is None or not overlaps.rows:
            return
        rows = memoryview(overlaps.rows).cast("I")
        places, *tiers = [rows[column :: 1 + TIERS].tolist() for column in range(1 + TIERS)]
        blocks = list(map(sum, zip(*tiers, strict=True)))
        chosen = decision.prefill or decision.chosen
        place = self._place(overlaps.ranks, (chosen.instance, chosen.rank))
        records.best[index] = max(blocks) * self._size
        records.held[index] = blocks[places.index(place)] * self._size if place in places else 0

    def _place(self, ranks: list[RankKey], rank: tuple[str, int]) -> int:
        if ranks is not self._ranks:
            self._ranks = ranks
            self._places = {(key.instance, key.rank): at for at, key in enumerate(ranks)}
        return self._places.get(rank, NOWHERE)

    def computed(self, index: int) -> None:
        """The prompt is in some engine's memory."""
        round_ = self._rounds[index]
        self._made.add(round_.branch, round_.input_tokens)

    def ended(self, index: int, generated: int) -> None:
        """So is the answer, but for its last token."""
        round_ = self._rounds[index]
        for cache in (self._asked, self._made):
            cache.add(round_.answer, round_.input_tokens + generated - 1)
