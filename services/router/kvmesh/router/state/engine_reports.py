"""Correction of the tracked load by the engines' own reports.

The tracker is ahead of an engine by the requests in flight. An engine that reports more than is
tracked runs work that this mesh did not place or has lost track of. An engine that reports less
over a whole window never received it, or its end was not published: a frontend died, or a message
was lost.
"""

from math import inf

from kvmesh.bus.messages import Load
from kvmesh.router.state.rank_table import RankTable

WINDOW_S = 3.0


class _Window:
    """The least surplus of tracked over reported load in the window, in tokens and blocks."""

    __slots__ = ("blocks", "since", "tokens")

    def __init__(self, now: float) -> None:
        self.since = now
        self.tokens = inf
        self.blocks = inf


class EngineReports:
    """Maintains a RankTable's `correction_tokens` and `correction_blocks`, added to tracked loads.

    Requests that wait in the engine, or are held back from it, hold no blocks yet: while some do,
    blocks are not subtracted. Tokens are not subtracted while requests wait and the engine reports
    no tokens to prefill: such an engine does not count the tokens of waiting requests.
    """

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._windows: dict[int, _Window] = {}

    def apply(self, load: Load, now: float) -> int | None:
        """Apply one report; returns its slot, None if the rank is unknown."""
        table = self._table
        slot = table.find_slot(load.instance, load.rank)
        if slot is None:
            return None
        cells = table.cells
        table.set_capacity(slot, load.total_blocks)
        table.set_load_ratio(slot, load.load_ratio)
        window = self._windows.get(slot)
        if window is None:
            window = self._windows[slot] = _Window(now)
        closed = now - window.since >= WINDOW_S
        held = cells.held_tokens[slot]
        tokens = cells.prefill_tokens[slot] - held - load.prefill_tokens
        least = 0.0 if load.waiting > 0 and not load.prefill_tokens else tokens
        if least < window.tokens:
            window.tokens = least
        before = cells.correction_tokens[slot]
        cells.correction_tokens[slot] = _correction(tokens, window.tokens, closed, before)
        blocks = cells.active_blocks[slot] - load.active_blocks
        least = 0.0 if load.waiting or held > 0 else blocks
        if least < window.blocks:
            window.blocks = least
        before = cells.correction_blocks[slot]
        cells.correction_blocks[slot] = _correction(blocks, window.blocks, closed, before)
        if closed:
            self._windows[slot] = _Window(now)
        return slot

    def forget(self, slots: list[int]) -> None:
        """Drop the windows of `slots`, whose worker is gone."""
        for slot in slots:
            self._windows.pop(slot, None)


def _correction(surplus: float, least: float, closed: bool, before: float) -> float:
    if surplus <= 0:
        return -surplus
    if closed:
        return -max(least, 0.0)
    return max(min(before, 0.0), -max(least, 0.0))
