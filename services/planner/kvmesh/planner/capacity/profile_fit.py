"""A step profile from the samples of live steps: points on curves, as far as the samples tell.

The base is the linear fit. Points bend it where that predicts held-out samples better.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmesh.planner.capacity.profiled_times import (
    ScaledProfile,
    predicted_seconds,
    relative_error,
)
from kvmesh.planner.capacity.queueing import StepTimes
from kvmesh.planner.capacity.step_times import FittedStepTimes, StepSample, fit_step_times
from kvmesh.step_times.profile import EngineLimits, StepProfile

FEWEST = 48
SPREAD = 1.5  # least ratio of the largest to the smallest step, of prefill and of decode
AGREE = 0.3  # most difference between the fits to two halves of the samples
POINTS = 8
HELD_OUT = 4  # every fourth sample of a cell
BENDS = (10.0, 1.0, 0.1, 0.01, 0.001)  # weights of the curvature against the samples
RIDGE = 0.03  # weight of the distance from the straight line, as a share of that of the curvature
ROUNDS = 10  # of reweighted least squares
MOST_CONTEXT = 262_144.0

Array = NDArray[np.float64]


class ProfileFitError(ValueError):
    """The samples do not tell the step times; the message says what is missing."""


@dataclass(frozen=True)
class FittedProfile:
    """The arrays of a profile, and its errors relative to the samples that it was not fitted to.

    `prefill` and `decode` are the ranges of tokens that the samples cover.
    """

    arrays: dict[str, Array]
    samples: int
    median_error: float
    p90_error: float
    prefill: tuple[float, float]
    decode: tuple[float, float]


def fit_profile(cells: Sequence[Sequence[StepSample]], limits: EngineLimits) -> FittedProfile:
    """The profile that fits the samples best; raises ProfileFitError if they do not suffice."""
    samples = [sample for cell in cells for sample in cell]
    prefill, decode = _ranges(samples)
    _check_separable(cells, prefill, decode)
    held = [[s for n, s in enumerate(cell) if n % HELD_OUT == HELD_OUT - 1] for cell in cells]
    kept = [s for cell in cells for n, s in enumerate(cell) if n % HELD_OUT != HELD_OUT - 1]

    def loss(bend: float | None) -> float:
        """The mean over cells, so that the many steps that only decode do not decide alone."""
        times = _times(kept, bend, limits)
        return float(np.mean([relative_error(times, cell) for cell in held if cell]))

    best = min((None, *BENDS), key=loss)
    times = _times(kept, best, limits)
    errors = [
        abs(predicted_seconds(times, s) - s.seconds) / s.seconds for cell in held for s in cell
    ]
    return FittedProfile(
        _arrays(samples, best, limits),
        len(samples),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        prefill,
        decode,
    )


def _ranges(samples: Sequence[StepSample]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ranges of prompt tokens of a step and of KV tokens; raises ProfileFitError."""
    if len(samples) < FEWEST:
        raise ProfileFitError(f"{len(samples)} samples of steps; at least {FEWEST} are needed")
    prefills = [s.tokens / s.prefills for s in samples if s.prefills and s.tokens]
    decodes = [s.decoded_kv / s.decodes for s in samples if s.decodes and s.decoded_kv]
    found = []
    for name, values in (("compute prompts", prefills), ("decode", decodes)):
        if len(values) < FEWEST / 4:
            raise ProfileFitError(f"only {len(values)} samples have steps that {name}")
        low, high = (float(value) for value in np.quantile(values, (0.02, 0.98)))
        if high < SPREAD * low:
            raise ProfileFitError(
                f"all steps that {name} have about {np.median(values):,.0f} tokens: the time of"
                " others is unknown"
            )
        found.append((low, high))
    return found[0], found[1]


def _check_separable(
    cells: Sequence[Sequence[StepSample]],
    prefill: tuple[float, float],
    decode: tuple[float, float],
) -> None:
    """Raise ProfileFitError if two halves of the samples give different step times."""
    halves = [
        fit_step_times([s for cell in cells for n, s in enumerate(cell) if n % 2 == half])
        for half in (0, 1)
    ]
    first, second = halves
    if first is None or second is None:
        raise ProfileFitError("too few samples have steps that compute prompts")
    # short prompts are left out: they take as long as reading the weights, which no line shows
    prompts = (prefill[0] * prefill[1]) ** 0.5, prefill[1]
    pairs = [(first.prefill(int(t)), second.prefill(int(t))) for t in prompts]
    pairs += [(first.decode(1, t), second.decode(1, t)) for t in decode]
    if any(abs(a - b) > AGREE * max(a, b) for a, b in pairs):
        raise ProfileFitError(
            "the samples do not tell the time of prefill from that of decode: two halves of them"
            " disagree by more than 30%; more varied traffic is needed"
        )


def _times(samples: Sequence[StepSample], bend: float | None, limits: EngineLimits) -> StepTimes:
    return ScaledProfile(StepProfile(_arrays(samples, bend, limits)))


def _arrays(
    samples: Sequence[StepSample], bend: float | None, limits: EngineLimits
) -> dict[str, Array]:
    """The arrays of a profile with the points bent by `bend`, or on the straight lines."""
    linear = fit_step_times(samples)
    if linear is None:
        raise ProfileFitError("too few samples have steps that compute prompts")
    rows = np.array(samples, dtype=np.float64)
    prompts = _points(rows[:, 2], rows[:, 1], limits.max_batched_tokens)
    active = _points(rows[:, 3], rows[:, 0], limits.kv_tokens)
    prefill = np.array([linear.prefill(max(int(t), 1)) for t in prompts])
    decode = np.array([linear.decode(1, float(t)) for t in active])
    if bend is not None:
        up, along = _bent(rows, linear, (prompts, prefill), (active, decode), bend)
        prefill = np.maximum.accumulate(np.maximum(prefill + up, prefill / 10))
        decode = np.maximum.accumulate(np.maximum(decode + along, decode / 10))
    known = {name: np.array(float(value)) for name, value in vars(limits).items()}
    return {
        "prefill_isl": prompts,
        "prefill_ttft_ms": 1000 * prefill,
        "decode_active_kv_tokens": active,
        "decode_context_length": np.array([1.0, MOST_CONTEXT]),
        "decode_itl": np.tile(1000 * decode[:, None], 2),
        **known,
    }


def _points(totals: Array, steps: Array, most: float) -> Array:
    """Points over the tokens per step: at quantiles of the samples, and at the bounds."""
    sampled = totals[(steps > 0) & (totals > 0)] / steps[(steps > 0) & (totals > 0)]
    inner = np.quantile(sampled, np.linspace(0.02, 0.98, POINTS)).round()
    points = np.unique(np.array([1.0, *inner, max(float(most), inner[-1] + 1)]))
    return points[np.concatenate(([True], np.diff(points) >= 1))]


def _bent(
    rows: Array,
    linear: FittedStepTimes,
    prefill: tuple[Array, Array],
    decode: tuple[Array, Array],
    bend: float,
) -> tuple[Array, Array]:
    """Seconds to add to the straight lines at each point: ridge on value and curvature.

    Additions are relative to the larger of the line and a decode step. A report may count a step
    whose time is in the next one, so samples far off the curve lose weight (Huber 1964).
    """
    (prompts, prefill_s), (active, decode_s) = prefill, decode
    scales = np.concatenate((np.maximum(prefill_s, decode_s[0]), decode_s))
    decodes, prefills, tokens, decoded_kv, seconds = rows[:, :5].T
    weights = 1.0 / np.maximum(seconds, 1e-3)
    features = np.hstack(
        [
            _hats(tokens / np.maximum(prefills, 1), prompts) * (prefills * (tokens > 0))[:, None],
            _hats(decoded_kv / np.maximum(decodes, 1), active) * decodes[:, None],
        ]
    )
    features *= scales * weights[:, None]
    straight = linear.prefill_step * prefills + linear.token * tokens
    straight = straight + linear.step * decodes + linear.kv_token * decoded_kv
    residual = (seconds - straight) * weights
    count = len(prompts)
    penalty = RIDGE * np.eye(len(scales))
    penalty[:count, :count] += _roughness(prompts)
    penalty[count:, count:] += _roughness(active)
    relative = np.zeros(len(scales))
    for _ in range(ROUNDS):
        off = np.abs(residual - features @ relative)
        trust = np.minimum(1.0, max(2 * float(np.median(off)), 0.005) / np.maximum(off, 1e-9))
        gram = (features * trust[:, None]).T @ features + bend * penalty
        relative = np.linalg.solve(gram, features.T @ (trust * residual))
    added = np.clip(relative, -0.9, 9.0) * scales
    return added[:count], added[count:]


def _hats(values: Array, points: Array) -> Array:
    """The share of each point in the linear interpolation at each value, clipped to the ends."""
    clipped = np.clip(values, points[0], points[-1])
    right = np.clip(np.searchsorted(points, clipped, side="right"), 1, len(points) - 1)
    share = (clipped - points[right - 1]) / (points[right] - points[right - 1])
    hats = np.zeros((len(values), len(points)))
    every = np.arange(len(values))
    hats[every, right - 1] = 1 - share
    hats[every, right] = share
    return hats


def _roughness(points: Array) -> Array:
    """The quadratic form of the second differences of relative additions."""
    second = np.zeros((max(len(points) - 2, 0), len(points)))
    for n in range(len(second)):
        second[n, n : n + 3] = 1, -2, 1
    form: Array = second.T @ second
    return form
