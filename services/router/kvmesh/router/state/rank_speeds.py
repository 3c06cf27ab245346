"""Slowness of each rank: its time for the same work relative to the other ranks of the model.

Step durations depend on the load, so they are not compared directly. The engines' counters are cut
into windows of work and time. One model of step times is fitted to all ranks, and the slowness of a
rank is the median of its windows' measured over expected time, normalised to 1 for the median rank
(ADR 24). Costs use it smoothly (ADR 50): not at all while ranks are alike within the error of the
fit, and less the older the evidence.
"""

import math
from typing import NamedTuple

import numpy as np

from kvmesh.bus.messages import Load
from kvmesh.router.state.arrays import Floats, Slots
from kvmesh.router.state.step_costs import COLUMNS, END, WORK, StepCosts, counted

WINDOW_S = 0.5
MIN_BUSY_S = 0.05  # below this a window is ignored
WINDOWS = 16
MIN_WINDOWS = 3
FIT_S = 2.0
GAIN = 0.7  # of a comparison, over those before
LASTING_S = 20.0  # of slowness, in which the part of it that does not count yet halves
FRESH_S = 15.0  # age of the last window from which on the slowness fades
FADE_S = 30.0  # in which its logarithm halves
EVIDENCE_S = 120.0  # afterwards a rank counts as normal until measured again
OUTLIER = 2.0  # times as slow, or as fast: a rank becomes an outlier
NORMAL = 1.5
CONTRARY = 4  # comparisons in a row that make an outlier, or end that
MAX_SLOWNESS = 10.0
RATE_HALF_S = 600.0
RATE_BUSY_S = 0.5  # in shorter windows, a step at the edge would count too much
ANSWER_MEMORY = 0.02  # weight of an answer in the mean
MOST_STEP_TOKENS = 1000.0  # prompt tokens that take as long as a step at most
_NEGLIGIBLE = math.log(1.05)
_TINY = 1e-12


class _RankHistory:
    """One rank: the start of its present window, and its past windows.

    `measured` is the last comparison, `applied` the logarithm of the slowness that costs use, which
    has had its sign since `unlike_since`.
    `contrary` counts comparisons in a row that contradict `outlier`, the first one at
    `contrary_since`. It is in that state since `since`.
    """

    __slots__ = (
        "applied",
        "contrary",
        "contrary_since",
        "load",
        "measured",
        "outlier",
        "since",
        "unlike_since",
        "window_start",
        "windows",
    )

    def __init__(self, load: Load, now: float) -> None:
        self.load = load
        self.window_start = now
        self.windows: Floats = np.empty((0, COLUMNS))
        self.applied = 0.0
        self.measured: float | None = None
        self.outlier = False
        self.unlike_since = now
        self.since = now
        self.contrary = 0
        self.contrary_since = now


class MeasuredSpeed(NamedTuple):
    """Speed of a rank relative to the median one; `since` when it is an outlier, if it is one."""

    speed: float
    since: float | None


class StepSeconds(NamedTuple):
    """Seconds of the median rank: for a prompt token, and for a step that only generates tokens.

    A step that computes prompt tokens has had `chunk` of them, on average.
    """

    prompt_token: float
    step: float
    chunk: float


class RankSpeeds:
    """`slowness` is an array by slot while ranks are unlike, else None.

    It counts while the speeds are `trusted`. `seconds` are the step times that the last comparison
    found, None before. `answer` is the mean number of tokens that requests generate, `compared` the
    number of windows that were compared.

    `prefill_rate` is the most prompt tokens that a rank computed per busy second of a window, 0 if
    unknown; an earlier rate counts half after RATE_HALF_S.
    """

    def __init__(self) -> None:
        self._histories: dict[int, _RankHistory] = {}
        self._costs = StepCosts()
        self._fitted = 0.0
        self.slowness: Floats | None = None
        self.seconds: StepSeconds | None = None
        self.answer = 0.0
        self.trusted = True
        self.compared = 0
        self.prefill_rate = 0.0
        self._rated = 0.0

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
        if now - history.window_start < WINDOW_S or load.steps == history.load.steps:
            return  # steps and busy time may be read less often than tokens are counted
        last, history.load, history.window_start = history.load, load, now
        busy = load.busy_s - last.busy_s
        if busy >= MIN_BUSY_S:
            window = _window(last, load, now)
            history.windows = np.concatenate((history.windows[1 - WINDOWS :], [window]))
            self.compared += 1
            if busy >= RATE_BUSY_S:
                self._observe_rate(window[WORK][1] / busy, now)

    def _observe_rate(self, rate: float, now: float) -> None:
        earlier = self.prefill_rate * 0.5 ** (max(now - self._rated, 0.0) / RATE_HALF_S)
        self.prefill_rate, self._rated = max(earlier, rate), now

    def observe_answer(self, tokens: int) -> None:
        """Record the number of tokens that a request has generated."""
        self.answer += (tokens - self.answer) * (ANSWER_MEMORY if self.answer else 1.0)

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
            windows = history.windows
            if len(windows) and now - windows[0, END] > EVIDENCE_S:
                history.windows = windows[now - windows[:, END] <= EVIDENCE_S]
            if len(history.windows) < MIN_WINDOWS:
                history.measured, history.outlier, history.contrary = None, False, 0
        known = [h for h in self._histories.values() if len(h.windows) >= MIN_WINDOWS]
        if len(known) > 1:
            self._compare(known, now)
        unlike = False
        measured = [1.0 if h.measured is None else h.measured for h in self._histories.values()]
        factors = counted(np.clip(measured, 1 / MAX_SLOWNESS, MAX_SLOWNESS)).tolist()
        for history, factor in zip(self._histories.values(), factors, strict=True):
            _apply(history, factor, now)
            unlike = unlike or history.applied != 0.0
        self.slowness = np.ones(size) if unlike else None
        if self.slowness is not None:
            for slot, history in self._histories.items():
                self.slowness[slot] = math.exp(history.applied)

    def _compare(self, known: list[_RankHistory], now: float) -> None:
        windows = np.concatenate([history.windows for history in known])
        counts = np.array([len(history.windows) for history in known])
        found = self._costs.compare(windows, counts)
        for history, value in zip(known, found, strict=True):
            history.measured = value
            _update_outlier(history, value, now)
        total = windows[:, WORK].copy().sum(0)
        seconds = total * self._costs.seconds
        prefill_s = float(seconds[1] + seconds[3])
        step_s = float(seconds[0] + seconds[2] + seconds[4:].sum()) / max(float(total[0]), 1.0)
        token_s = prefill_s / max(float(total[1]), 1.0)
        chunk = float(total[1]) / max(float(total[3]), 1.0)
        self.seconds = StepSeconds(max(token_s, step_s / MOST_STEP_TOKENS, _TINY), step_s, chunk)

    def factors(self, slots: Slots) -> Floats | None:
        """Cost factors of some slots; None while ranks are alike, or the speeds not trusted."""
        if self.slowness is None or not self.trusted:
            return None
        return np.where(slots < len(self.slowness), self.slowness.take(slots, mode="clip"), 1.0)

    @property
    def prompt_token_s(self) -> float:
        """Seconds in which a rank of median speed computes a prompt token; 0 if unknown."""
        if self.seconds is not None:
            return self.seconds.prompt_token
        return 1 / self.prefill_rate if self.prefill_rate else 0.0

    def decode_seconds(self, used: Floats, requests: Floats) -> Floats:
        """Seconds of a step that only generates tokens on ranks of median speed.

        They have these shares of their KV memory in use, for so many requests.
        """
        step, _, token, _, linear, root = self._costs.seconds.tolist()
        seconds: Floats = step + token * requests + linear * used + root * np.sqrt(used)
        return seconds

    def decode_tokens(self, used: float, requests: float, fixed: float) -> float:
        """Prompt tokens that a rank of median speed computes while it generates one token each.

        `used` and `requests` are as in `decode_seconds`. A step that computes prompt tokens takes
        as long as `fixed` more of them. 0 before a comparison.
        """
        seconds = self.seconds
        if seconds is None or not seconds.chunk:
            return 0.0
        step, _, token, _, linear, root = self._costs.seconds.tolist()
        decode_s: float = step + token * requests + linear * used + root * math.sqrt(max(used, 0.0))
        return decode_s / seconds.prompt_token * (1 + fixed / seconds.chunk)

    def learned(self, slot: int) -> float:
        """The slowness of a slot, trusted or not."""
        if self.slowness is None or slot >= len(self.slowness):
            return 1.0
        return float(self.slowness[slot])

    @property
    def measured(self) -> dict[int, MeasuredSpeed]:
        """Speed of each rank that was busy lately, by slot."""
        return {
            slot: MeasuredSpeed(
                1 / max(history.measured, _TINY), history.since if history.outlier else None
            )
            for slot, history in self._histories.items()
            if history.measured is not None
        }

    @property
    def outliers(self) -> dict[int, float]:
        """Slowness of the outliers, by slot."""
        return {
            slot: min(max(history.measured, 1 / MAX_SLOWNESS), MAX_SLOWNESS)
            for slot, history in self._histories.items()
            if history.outlier and history.measured is not None
        }


def _window(last: Load, load: Load, now: float) -> tuple[float, ...]:
    """The columns of a window that ends now."""
    steps = load.steps - last.steps
    used = (last.active_blocks + load.active_blocks) / 2 / max(load.total_blocks, 1)
    tokens = max(load.computed_tokens - last.computed_tokens, 0)
    output = max(load.output_tokens - last.output_tokens, 0)
    prefills = max(load.prefill_steps - last.prefill_steps, 0)
    return (
        now,
        float(steps),
        float(tokens),
        float(output),
        float(prefills),
        steps * used,
        steps * math.sqrt(used),
        load.busy_s - last.busy_s,
    )


def _apply(history: _RankHistory, factor: float, now: float) -> None:
    """Move the slowness that costs use towards a `factor`, by the weight of the evidence."""
    wanted = 0.0
    if factor != 1.0:
        age = now - float(history.windows[-1, END])
        fresh = 0.5 ** (max(age - FRESH_S, 0.0) / FADE_S)
        wanted = math.log(factor) * fresh
    if wanted * history.applied <= 0.0:
        history.unlike_since = now
    wanted *= 1.0 - 0.5 ** (1.0 + (now - history.unlike_since) / LASTING_S)
    history.applied += GAIN * (wanted - history.applied)
    if abs(history.applied) < _NEGLIGIBLE and abs(wanted) < _NEGLIGIBLE:
        history.applied = 0.0


def _update_outlier(history: _RankHistory, value: float, now: float) -> None:
    """Update the outlier state, which changes after CONTRARY comparisons in a row."""
    far = value >= OUTLIER or value <= 1 / OUTLIER
    near = 1 / NORMAL < value < NORMAL
    changes = near if history.outlier else far
    history.contrary = history.contrary + 1 if changes else 0
    if history.contrary == 1:
        history.contrary_since = now
    if history.contrary >= CONTRARY:
        history.outlier = not history.outlier
        history.since = history.contrary_since
        history.contrary = 0
