"""Measurements of a simulation: columns over rounds, totals and samples per worker."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
NEVER = float("nan")


class Records:
    """One entry per round: times in virtual seconds (NaN until known), counts in tokens.

    `placed` is the time of the first placement. `prefiller` is the worker of the first token,
    `worker` that of the last attempt; each incarnation has a number, in the order of joining.
    `tiers` divides `cached` by tier.
    """

    def __init__(self, rounds: int) -> None:
        self.arrived = [NEVER] * rounds
        self.placed = [NEVER] * rounds
        self.first_token = [NEVER] * rounds
        self.ended = [NEVER] * rounds
        self.cached = [0] * rounds
        self.tiers: list[list[int]] = [[]] * rounds
        self.ideal = [0] * rounds
        self.computed = [0] * rounds
        self.best_rank = [0] * rounds
        self.chosen_rank = [0] * rounds
        self.output = [0] * rounds
        self.worker = [-1] * rounds
        self.prefiller = [-1] * rounds
        self.migrations = [0] * rounds
        self.error: list[str | None] = [None] * rounds

    def column(self, name: str) -> Column:
        """A column as floats."""
        return np.asarray(getattr(self, name), dtype=np.float64)


@dataclass(slots=True)
class LoadSample:
    """A worker's sequences and blocks at `time` (virtual seconds)."""

    time: float
    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int


@dataclass
class WorkerRecord:
    """Totals of one incarnation of a worker, and samples over time."""

    name: str
    busy_s: float = 0.0
    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    samples: list[LoadSample] = field(default_factory=list)
