"""What happened to each round, kept as columns."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
NEVER = float("nan")


class Records:
    """One entry per round; times in virtual seconds, NaN until they come; token counts.

    `placed` is the first placement. Of workers, which are numbered by life in the order in which
    they joined, `prefiller` gave the first token and `worker` was the last to have the round.
    """

    def __init__(self, rounds: int) -> None:
        self.arrived = [NEVER] * rounds
        self.placed = [NEVER] * rounds
        self.first = [NEVER] * rounds
        self.ended = [NEVER] * rounds
        self.cached = [0] * rounds
        self.ideal = [0] * rounds
        self.made = [0] * rounds
        self.best = [0] * rounds
        self.held = [0] * rounds
        self.output = [0] * rounds
        self.worker = [-1] * rounds
        self.prefiller = [-1] * rounds
        self.moves = [0] * rounds
        self.error: list[str | None] = [None] * rounds

    def column(self, name: str) -> Column:
        """A column as floats."""
        return np.asarray(getattr(self, name), dtype=np.float64)


@dataclass(slots=True)
class WorkerSpan:
    """What one worker did from `start` to `end`: its share of busy time and its blocks."""

    time: float
    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int


@dataclass
class WorkerRecord:
    """Totals of one worker life, and samples over time."""

    name: str
    busy_s: float = 0.0
    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    samples: list[WorkerSpan] = field(default_factory=list)
