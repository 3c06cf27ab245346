"""Detects engines without progress."""

from collections.abc import Iterable

from kvmesh.bus.messages import Load


class StallWatch:
    """Detects a rank that had work in `patience` observations in a row without a step between them.

    Observations are counted instead of time: a process that was stopped for a while made only one.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen: dict[int, tuple[int, int]] = {}
        self.stalled = False

    def observe(self, loads: Iterable[Load]) -> None:
        """Record the step count of each rank."""
        for load in loads:
            steps, observations = self._seen.get(load.rank, (-1, 0))
            if not (load.running or load.waiting):
                self._seen.pop(load.rank, None)
                continue
            observations = observations + 1 if load.steps == steps else 0
            self._seen[load.rank] = (load.steps, observations)
            self.stalled |= observations >= self._patience
