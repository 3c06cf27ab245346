"""Slowness of each rank: its time for the same work relative to the other ranks of the model.

Step durations depend on the load, so they are not compared directly. The engines' counters are cut
into windows: steps, prompt tokens computed, tokens generated, and steps weighted by the share of KV
memory in use. One cost model of these is fitted to all ranks. The slowness of a rank is the median
of its windows' measured over expected time, normalised to 1 for the median rank (ADR 24).
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from kvmesh.bus.messages import Load
from kvmesh.router.state.arrays import Floats, Slots

WINDOW_S = 1.0
MIN_BUSY_S = 0.05  # below this a window is ignored
WINDOWS = 12
MIN_WINDOWS = 3
FIT_S = 5.0
EVIDENCE_S = 120.0  # afterwards a rank counts as normal until measured again
OUTLIER = 2.0  # times as slow, or as fast: a rank becomes an outlier
NORMAL = 1.5
MAX_SLOWNESS = 10.0
_ROUNDS = 2
_STEPS = 40
_TINY = 1e-12


class _RankHistory:
    """One rank: the start of its present window, and its past windows.

    `slowness` is the published value (1: normal), `measured` the last comparison. `contrary` counts
    comparisons in a row that contradict its outlier state, the first one at `contrary_since`. It is
    in that state since `since`.
    """

    __slots__ = (
        "contrary",
        "contrary_since",
        "load",
        "measured",
        "since",
        "slowness",
        "window_start",
        "windows",
    )

    def __init__(self, load: Load, now: float) -> None:
        self.load = load
        self.window_start = now
        self.windows: deque[tuple[float, list[float], float]] = deque(maxlen=WINDOWS)
        self.slowness = 1.0
        self.measured: float | None = None
        self.since = now
        self.contrary = 0
        self.contrary_since = now


class MeasuredSpeed(NamedTuple):
    """Speed of a rank relative to the median one; `since` when it is an outlier, if it is one."""

    speed: float
    since: float | None


class RankSpeeds:
    """`slowness` is an array by slot while some rank is an outlier, else None."""

    def __init__(self) -> None:
        self._histories: dict[int, _RankHistory] = {}
        self._fitted = 0.0
        self.slowness: Floats | None = None

    def observe(self, slot: int, load: Load, now: float) -> None:
        """Record one load report of the rank in a slot."""
        if not load.busy_s:
            return  # the engine does not report it, or has been idle so far
        history = self._histories.get(slot)
        if (
            history is None
            or load.instance != history.load.instance
            or load.steps < history.load.steps
        ):
            self._histories[slot] = _RankHistory(load, now)
            return
        if now - history.window_start < WINDOW_S:
            return
        last, history.load, history.window_start = history.load, load, now
        busy = load.busy_s - last.busy_s
        if busy >= MIN_BUSY_S:
            history.windows.append((now, _work(last, load), busy))

    def forget(self, slots: list[int]) -> None:
        """Drop the windows of `slots`, whose worker is gone."""
        for slot in slots:
            self._histories.pop(slot, None)
            if self.slowness is not None and slot < len(self.slowness):
                self.slowness[slot] = 1.0

    def update(self, now: float, size: int) -> None:
        """Compare the ranks every FIT_S seconds; `size` is the number of slots."""
        if now - self._fitted < FIT_S:
            return
        self._fitted = now
        for history in self._histories.values():
            while history.windows and now - history.windows[0][0] > EVIDENCE_S:
                history.windows.popleft()
        known = {
            s: history
            for s, history in self._histories.items()
            if len(history.windows) >= MIN_WINDOWS
        }
        found = _fit(list(known.values())) if len(known) > 1 else []
        for history in self._histories.values():
            if len(history.windows) < MIN_WINDOWS:
                history.slowness, history.contrary, history.measured = 1.0, 0, None
        for history, value in zip(known.values(), found, strict=False):
            history.measured = value
            _update_slowness(history, value, now)
        outliers = {
            slot: history.slowness
            for slot, history in self._histories.items()
            if history.slowness != 1.0
        }
        self.slowness = None
        if outliers:
            self.slowness = np.ones(size)
            for slot, value in outliers.items():
                self.slowness[slot] = value

    def factors(self, slots: Slots) -> Floats | None:
        """Cost factors of some slots; None if no rank is an outlier."""
        if self.slowness is None:
            return None
        return np.where(slots < len(self.slowness), self.slowness.take(slots, mode="clip"), 1.0)

    @property
    def measured(self) -> dict[int, MeasuredSpeed]:
        """Speed of each rank that was busy lately, by slot."""
        return {
            slot: MeasuredSpeed(
                1 / max(history.measured, _TINY),
                history.since if history.slowness != 1.0 else None,
            )
            for slot, history in self._histories.items()
            if history.measured is not None
        }

    @property
    def outliers(self) -> dict[int, float]:
        """Slowness of the outliers, by slot."""
        return {
            slot: history.slowness
            for slot, history in self._histories.items()
            if history.slowness != 1.0
        }


def _work(last: Load, load: Load) -> list[float]:
    steps = load.steps - last.steps
    used = (last.active_blocks + load.active_blocks) / 2 / max(load.total_blocks, 1)
    tokens = max(load.computed_tokens - last.computed_tokens, 0)
    return [steps, tokens, max(load.output_tokens - last.output_tokens, 0), steps * used]


def _update_slowness(history: _RankHistory, value: float, now: float) -> None:
    """Update the published slowness; its state changes after two comparisons in a row."""
    far = value >= OUTLIER or value <= 1 / OUTLIER
    near = 1 / NORMAL < value < NORMAL
    changes = near if history.slowness != 1.0 else far
    history.contrary = history.contrary + 1 if changes else 0
    if history.contrary == 1:
        history.contrary_since = now
    if history.slowness != 1.0 and not near:
        history.slowness = min(max(value, 1 / MAX_SLOWNESS), MAX_SLOWNESS)
    elif history.contrary >= 2:
        history.slowness = min(max(value, 1 / MAX_SLOWNESS), MAX_SLOWNESS) if far else 1.0
        history.since = history.contrary_since
        history.contrary = 0


def _fit(ranks: list[_RankHistory]) -> list[float]:
    """Slowness of each rank relative to the median one; alternates fits of costs and slowness."""
    rows = np.array([row for history in ranks for _, row, _ in history.windows])
    busy_s = np.array([busy for history in ranks for _, _, busy in history.windows])
    ends = np.cumsum([len(history.windows) for history in ranks])[:-1]
    counts = [len(history.windows) for history in ranks]
    rows /= np.maximum(rows.max(0), _TINY)
    slowness = np.ones(len(ranks))
    for _ in range(_ROUNDS):
        expected = rows @ _costs(rows * (np.repeat(slowness, counts) / busy_s)[:, None])
        ratios = np.split(busy_s / np.maximum(expected, _TINY), ends)
        slowness = np.array([np.median(ratio) for ratio in ratios])
        slowness /= np.sort(slowness)[(len(slowness) - 1) // 2]
    found: list[float] = slowness.tolist()
    return found


def _costs(rows: Floats) -> Floats:
    """Non-negative costs c with rows @ c close to 1, by multiplicative updates."""
    gram, goal = rows.T @ rows, rows.sum(0)
    costs: Floats = goal / np.maximum(gram.sum(1), _TINY)
    for _ in range(_STEPS):
        costs = costs * goal / np.maximum(gram @ costs, _TINY)
    return costs
