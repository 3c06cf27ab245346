"""Batch requests: they fill the room that others leave, and wait while any other request does.

Engines compute them last, so their prompts do not count against others.
"""

from collections.abc import Collection
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmesh.bus.messages import (
    BATCH_PRIORITY,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqWait,
    batch_classes,
    of_class,
    prefill_part,
)
from kvmesh.router.errors import RouterOverloaded
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.state.arrays import Floats, Slots
from kvmesh.router.waiting.fair_order import BATCH

Flags: TypeAlias = NDArray[np.bool_]
TIER = -1  # below all others
IDLE_S = 30.0  # without other requests, after which a fleet counts as idle
IDLE_SHARE = 0.8  # of a rank's blocks on an idle fleet; outputs grow into the rest
PEAK_S = 60.0
STEPS = 0.5  # engine steps of prefill from which a rank has no room


class BatchLane:
    """The batch requests of one model: their lanes, their room, and their prompts in engines.

    All of them wait in the queue at least for a moment. So every replica knows them by their
    entries.
    """

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._classes = batch_classes(core.settings.batch_classes)
        self._share = core.settings.batch_blocks_share
        self._prompts: dict[str, tuple[str, int, float]] = {}  # instance, rank, uncached tokens
        self._others: set[str] = set()  # other requests in engines, and those without a first token
        self._computing: set[str] = set()
        self._others_at = -inf
        self._peak = self._peak_before = 0  # most others with a prompt at once, in this window
        self._window_ends = -inf
        self._idle = False

    def includes(self, request: RouteRequest) -> bool:
        """True for requests of batch classes."""
        return of_class(request.hints, self._classes)

    def others(self, lanes: Collection[str]) -> list[str]:
        """The lanes of other requests."""
        return [lane for lane in lanes if not lane.startswith(BATCH)]

    def room(self, request: RouteRequest) -> Slots:
        """The ranks with room for a request; raises NoWorkers if none may ever run it.

        As many ranks as others have needed at once stay without a prompt to compute, one at least
        and all but one at most: a request that comes next does not wait for the step of a batch
        request there. On an idle fleet batch requests have all ranks and nearly all memory.
        """
        table = self._core.table
        try:
            slots = self._core.choice.eligible(request)
        except RouterOverloaded:
            return np.zeros(0, np.int64)
        if table.disaggregated:
            prefill = table.eligible(request.placement, request.adapter, "prefill")
            if len(prefill) and not self._unhurried(prefill).any():
                return np.zeros(0, np.int64)
        calm = self._unhurried(slots)
        peak = max(self._peak, self._peak_before, 1)
        kept = 0 if self._idle else min(peak, len(slots) - 1)
        if calm.sum() <= kept:
            return np.zeros(0, np.int64)
        total = table.total_blocks.take(slots)
        blocks = table.loads(slots)[1]
        share = max(self._share, IDLE_SHARE) if self._idle else self._share
        free = (blocks < share * total) | (total == 0)
        chosen: Slots = slots[free & calm]
        return chosen

    def _unhurried(self, slots: Slots) -> Flags:
        """True for the ranks with almost no prompt to compute."""
        table = self._core.table
        found: Flags = table.loads(slots)[0] <= STEPS * table.step_tokens.take(slots)
        return found

    def placed(self, entry: SeqWait, events: Collection[SeqEvent]) -> None:
        """Remember the prompt of a batch request that was placed."""
        names = entry.request, prefill_part(entry.request)
        for event in events:
            if type(event) is SeqAdd and event.request in names:
                cached = event.overlap * self._core.table.block_size
                tokens = float(max(event.tokens - cached, 0))
                self._prompts[event.request] = event.instance, event.rank, tokens

    def apply(self, event: SeqEvent, now: float) -> None:
        """Follow the requests in engines: their prompts, and whether any is no batch request."""
        name = event.request
        if type(event) is SeqAdd:
            if event.priority <= BATCH_PRIORITY:
                return
            self._others.add(name)
            self._computing.add(name)
            self._peak = max(self._peak, len(self._computing))
            self._others_at, self._idle = now, False
        elif type(event) in (SeqPrefilled, SeqFree):
            self._prompts.pop(name, None)
            self._prompts.pop(prefill_part(name), None)
            self._computing.discard(name)
            if type(event) is SeqFree and name in self._others:
                self._others.discard(name)
                self._others_at = now

    def expire(self, now: float) -> None:
        """Note whether the fleet is idle, and forget the peak of others after a while."""
        active = self._core.active
        lost = {name for name in self._others if name not in active}
        self._others -= lost
        self._computing -= lost
        self._idle = not self._others and now - self._others_at > IDLE_S
        if now >= self._window_ends:
            self._window_ends = now + PEAK_S
            self._peak_before, self._peak = self._peak, len(self._computing)

    def prefill(self, slots: Slots) -> Floats | None:
        """Tokens of batch prompts that each rank has yet to compute; None if none has any."""
        if not self._prompts:
            return None
        table, active = self._core.table, self._core.active
        found = np.zeros(table.size)
        for name, (instance, rank, tokens) in list(self._prompts.items()):
            slot = table.slot_of.get((instance, rank))
            if slot is None or name not in active:  # lost with its worker or its frontend
                del self._prompts[name]
            else:
                found[slot] += tokens
        taken: Floats = found.take(slots)
        return taken
