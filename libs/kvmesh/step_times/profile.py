"""Step times of a GPU and model, read from an NPZ file."""

import zipfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmesh.step_times.interface import DecodeLoad

MOST_BYTES = 64 << 20  # of a file: a profile has some kilobytes


class StepProfileError(Exception):
    """A performance profile cannot be used; the message names the file and the array."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine that a profile describes, in tokens and sequences.

    `kv_bytes_per_token` is 0 if unknown.
    """

    max_batched_tokens: int
    max_sequences: int
    kv_tokens: int
    kv_bytes_per_token: int = 0


LIMITS = ("max_batched_tokens", "max_sequences", "kv_tokens")


class StepProfile:
    """Step times: linear between the points, and beyond them along the last slope.

    The NPZ file has `prefill_isl` (tokens) and `prefill_ttft_ms`, one value per point, and
    `decode_itl` (ms) over `decode_active_kv_tokens` × `decode_context_length` (tokens). The numbers
    `max_batched_tokens`, `max_sequences`, `kv_tokens` and `kv_bytes_per_token` may be present.
    `name` is that of its file.
    """

    def __init__(self, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        self.name = ""
        self._isl = Axis(arrays["prefill_isl"], "prefill_isl")
        self._ttft = _values(arrays["prefill_ttft_ms"], "prefill_ttft_ms", (len(self._isl),))
        self._active = Axis(arrays["decode_active_kv_tokens"], "decode_active_kv_tokens")
        self._context = Axis(arrays["decode_context_length"], "decode_context_length")
        shape = (len(self._active), len(self._context))
        self._itl = _values(arrays["decode_itl"], "decode_itl", shape)
        self.limits = _limits(arrays)

    @classmethod
    def load(cls, file: Path) -> "StepProfile":
        """Read a profile; raises StepProfileError if the file or one of its arrays is unfit."""
        try:
            if file.stat().st_size > MOST_BYTES:
                raise StepProfileError(f"{file} is not a performance profile: too large")
            with np.load(file) as arrays:
                return cls({name: np.asarray(arrays[name], np.float64) for name in arrays.files})
        except KeyError as error:
            raise StepProfileError(f"{file} has no array {error}") from error
        except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise StepProfileError(f"{file} is not a performance profile: {error}") from error

    @property
    def measured_tokens(self) -> tuple[float, float]:
        """The most prompt tokens of a step and the most KV tokens that the points cover."""
        return self._isl.last, self._active.last

    def prefill(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        i, share = self._isl.locate(tokens)
        return max(0.0, _between(self._ttft[i], self._ttft[i + 1], share)) / 1000

    def decode(self, load: DecodeLoad) -> float:
        if not load.sequences:
            return 0.0
        return self.decode_seconds(load.sequences, load.active_tokens)

    def decode_seconds(self, sequences: int, tokens: float) -> float:
        """Seconds to generate a token for each of `sequences` with `tokens` of KV in all."""
        i, upward = self._active.locate(tokens)
        j, along = self._context.locate(tokens / sequences)
        low = _between(self._itl[i][j], self._itl[i][j + 1], along)
        high = _between(self._itl[i + 1][j], self._itl[i + 1][j + 1], along)
        return max(0.0, _between(low, high, upward)) / 1000


class Axis:
    """The points of one dimension: at least two, strictly increasing."""

    def __init__(self, points: NDArray[np.float64], name: str) -> None:
        if points.ndim != 1 or len(points) < 2 or not (np.diff(points) > 0).all():
            raise ValueError(f"{name} must rise strictly over at least two points")
        self._points: list[float] = points.tolist()

    def __len__(self) -> int:
        return len(self._points)

    @property
    def last(self) -> float:
        return self._points[-1]

    def locate(self, value: float) -> tuple[int, float]:
        """The interval that applies and the position in it, outside 0 … 1 beyond the ends."""
        points = self._points
        i = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
        return i, (value - points[i]) / (points[i + 1] - points[i])


def _limits(arrays: Mapping[str, NDArray[np.float64]]) -> EngineLimits | None:
    """The limits, all or none; raises ValueError for others than whole positive numbers."""
    found = {name: arrays[name] for name in (*LIMITS, "kv_bytes_per_token") if name in arrays}
    for name, value in found.items():
        if value.size != 1 or not np.isfinite(value).all() or value.item() < (name in LIMITS):
            raise ValueError(f"{name} must be one positive number")
    if not all(name in found for name in LIMITS):
        return None
    return EngineLimits(**{name: int(value.item()) for name, value in found.items()})


def _values(array: NDArray[np.float64], name: str, shape: tuple[int, ...]) -> Any:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, not {shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite")
    if (array < 0).any():
        raise ValueError(f"{name} has negative times")
    return array.tolist()


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
