"""Batch requests: they fill the room that others leave, and wait while any other request does.

Engines compute them last, so their prompts do not count against others.
"""

from collections.abc import Collection
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmesh.bus.messages import (
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqWait,
    of_class,
    prefill_part,
)
from kvmesh.router.errors import RouterOverloaded
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.state.arrays import Floats, Slots
from kvmesh.router.waiting.fair_order import BATCH

Flags: TypeAlias = NDArray[np.bool_]
TIER = -1  # below all others
STEPS = 0.5  # engine steps of prefill from which a rank has no room


class BatchLane:
    """The batch requests of one model: their lanes, their room, and their prompts in engines.

    All of them wait in the queue at least for a moment. So every replica knows them by their
    entries.
    """

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._classes = frozenset(core.settings.batch_classes)
        self._share = core.settings.batch_blocks_share
        self._prompts: dict[str, tuple[str, int, float]] = {}  # instance, rank, uncached tokens

    def includes(self, request: RouteRequest) -> bool:
        """True for requests of batch classes."""
        return bool(self._classes) and of_class(request.hints, self._classes)

    def others(self, lanes: Collection[str]) -> list[str]:
        """The lanes of other requests."""
        return [lane for lane in lanes if not lane.startswith(BATCH)]

    def room(self, request: RouteRequest) -> Slots:
        """The ranks with room for a request; raises NoWorkers if none may ever run it.

        One of several ranks always stays without a prompt to compute: a request that comes next
        does not wait for the step of a batch request there.
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
        if calm.sum() < min(len(slots), 2):
            return np.zeros(0, np.int64)
        total = table.total_blocks.take(slots)
        blocks = table.loads(slots)[1]
        free = (blocks < self._share * total) | (total == 0)
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

    def apply(self, event: SeqEvent) -> None:
        """Forget a prompt that has been computed, or whose request has ended."""
        if self._prompts and type(event) in (SeqPrefilled, SeqFree):
            self._prompts.pop(event.request, None)
            self._prompts.pop(prefill_part(event.request), None)

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
