"""Active requests by rank, as published by the mesh: the tracked load of each rank."""

from collections import OrderedDict

from kvmesh.bus.messages import (
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
    prefill_part,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.arrays import Floats
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree
from kvmesh.router.state.rank_table import RankTable


class TrackedRequest:
    """One request on a rank; loads are what it adds to the rank's columns."""

    __slots__ = (
        "decodes_since",
        "last_event",
        "osl",
        "output_blocks",
        "partial_blocks",
        "prefill_tokens",
        "prefix_end",
        "slot",
    )

    def __init__(
        self, slot: int, end: PrefixNode, prefill: float, tail: int, osl: int, now: float
    ) -> None:
        self.slot = slot
        self.prefix_end = end
        self.prefill_tokens = prefill
        self.partial_blocks = tail
        self.osl = osl
        self.output_blocks = 0.0
        self.last_event = now
        self.decodes_since: float | None = None


class ActiveSequences:
    """Applies active-sequence events to the load arrays of a RankTable. Times in seconds.

    Prompt blocks that several requests share on one rank count once. Prefill tokens count until
    the first token. `g` generated tokens count as g / block_size blocks, weighted by
    max(1 - g / osl, 0) where `osl` is known: a request near its end soon frees its blocks. A
    request without events for `ttl` seconds is lost and no longer counts.
    """

    def __init__(self, table: RankTable, ttl: float) -> None:
        self._table = table
        self._tree = PrefixTree()
        self._ttl = ttl
        self._active: OrderedDict[str, TrackedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, request: str | None) -> bool:
        return request in self._active

    def apply(self, event: SeqEvent, now: float) -> None:
        """Apply one event; repeated and unknown ones change nothing."""
        # Compares types: a failing isinstance of these structs takes five times as long.
        if type(event) is SeqProgress:
            self._progress(event.request, event.generated, now)
        elif type(event) is SeqPrefilled:
            self._prefilled(event.request, now)
        elif type(event) is SeqFree:
            self._ended(event.request, now)
        elif type(event) is SeqAdd:
            self.add(event, now)

    def held_depths(self, sequence_hashes: bytes) -> Floats:
        """Leading blocks of a prompt that active requests hold, per slot."""
        return self._tree.depths(sequence_hashes, self._table.size)

    def withdraw(self, request: str) -> None:
        """Drop a request that is to be added anew, perhaps elsewhere; unknown ones are ignored."""
        self._free(request)

    def drop_stale(self, slot: int, before: float) -> None:
        """Drop a slot's requests without events since `before`; its engine is idle or gone."""
        if self._table.cells.requests[slot]:
            for request, active in list(self._active.items()):
                if active.slot == slot and active.last_event < before:
                    self._remove(request, active)

    def expire(self, now: float) -> list[str]:
        """Drop the requests without events for `ttl` seconds; returns their ids."""
        lost = []
        while self._active:
            request, active = next(iter(self._active.items()))
            if active.last_event + self._ttl > now:
                break
            self._remove(request, active)
            lost.append(request)
        return lost

    def add(self, event: SeqAdd, now: float) -> int | None:
        """Add a placed request; returns its slot, None if the request was known before."""
        known = self._active.get(event.request)
        table = self._table
        slot = table.slot(event.instance, event.rank)
        if known is not None:
            if known.slot == slot:
                return None
            self._remove(event.request, known)
        end, new = self._tree.add(slot, event.sequence_hashes)
        size = max(table.block_size, 1)
        tail = max(-(-event.tokens // size) - len(event.sequence_hashes) // HASH_BYTES, 0)
        prefill = max(event.tokens - event.overlap * size, 0)
        self._active[event.request] = TrackedRequest(slot, end, prefill, tail, event.osl, now)
        cells = table.cells
        cells.requests[slot] += 1
        cells.prefill_tokens[slot] += prefill
        cells.active_blocks[slot] += new + tail
        return slot if known is None else None

    def _prefilled(self, request: str, now: float) -> None:
        active = self._touch(request, now)
        if active is not None:
            self._table.cells.prefill_tokens[active.slot] -= active.prefill_tokens
            active.prefill_tokens = 0.0
            if active.decodes_since is None:
                active.decodes_since = now
        prefill_attempt = self._active.get(prefill_part(request))
        if prefill_attempt is not None:
            self._remove(prefill_part(request), prefill_attempt)

    def _progress(self, request: str, generated: int, now: float) -> None:
        active = self._touch(request, now)
        if active is None:
            return
        growth = generated / (self._table.block_size or 1)
        if active.osl:
            growth *= max(1 - generated / active.osl, 0.0)
        self._table.cells.active_blocks[active.slot] += growth - active.output_blocks
        active.output_blocks = growth

    def _ended(self, request: str, now: float) -> None:
        active = self._active.get(request)
        freed = self._free(request)
        if active is not None and active.decodes_since is not None:
            self._table.record_decode(max(now - active.decodes_since, 0.0), freed)

    def _free(self, request: str) -> float:
        """Drop a request and its prefill part; returns the blocks that they alone held."""
        freed = 0.0
        for name in (request, prefill_part(request)):
            active = self._active.get(name)
            if active is not None:
                freed += self._remove(name, active)
        return freed

    def _touch(self, request: str, now: float) -> TrackedRequest | None:
        active = self._active.get(request)
        if active is not None:
            if now > active.last_event:
                active.last_event = now
            self._active.move_to_end(request)
        return active

    def _remove(self, request: str, active: TrackedRequest) -> float:
        del self._active[request]
        cells, slot = self._table.cells, active.slot
        freed = active.partial_blocks + active.output_blocks
        freed += self._tree.drop(active.prefix_end, slot)
        cells.requests[slot] -= 1
        cells.prefill_tokens[slot] -= active.prefill_tokens
        cells.active_blocks[slot] -= freed
        if not cells.requests[slot]:
            cells.prefill_tokens[slot] = cells.active_blocks[slot] = 0  # removes rounding drift
            self._table.release_if_idle(slot)
        return freed
