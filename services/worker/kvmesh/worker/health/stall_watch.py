"""Whether an engine makes progress."""

from collections.abc import Iterable

from kvmesh.bus.messages import Load


class StallWatch:
    """Finds a rank that has had work at `patience` looks in a row without a single step between.

    Looks are counted instead of time: a process that was stopped for a while has looked only once.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen: dict[int, tuple[int, int]] = {}
        self.stalled = False

    def observe(self, loads: Iterable[Load]) -> None:
        """Note where each rank is now."""
        for load in loads:
            steps, looks = self._seen.get(load.rank, (-1, 0))
            if not (load.running or load.waiting):
                self._seen.pop(load.rank, None)
                continue
            looks = looks + 1 if load.steps == steps else 0
            self._seen[load.rank] = (load.steps, looks)
            self.stalled |= looks >= self._patience
