"""Detection of ranks whose index entries fall short of what their worker reports."""

from collections.abc import Mapping

from kvmesh.bus.messages import Load
from kvmesh.runtime.warnings import Streak

SHARE = 0.5
SPARE_BLOCKS = 64
LOOKS_TO_WARN = 10
LOOKS_TO_CLEAR = 2


class Shortfall:
    """Compares the indexed blocks of each rank with its worker's last report, once a second."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, int], int] = {}
        self._streaks: dict[tuple[str, int], Streak] = {}

    def record(self, load: Load) -> None:
        """Record a report's cached blocks; blocks in use may not be full, cached ones are."""
        self._reported[load.instance, load.rank] = load.cached_blocks

    def forget(self, instance: str) -> None:
        """Drop the reports of an instance."""
        for key in [key for key in self._reported if key[0] == instance]:
            del self._reported[key]
            self._streaks.pop(key, None)

    def check(self, indexed: Mapping[tuple[str, int], int]) -> dict[str, str]:
        """Ranks short of blocks for LOOKS_TO_WARN checks in a row, each with a warning text."""
        warnings = {}
        for key, held in self._reported.items():
            short = indexed.get(key, 0) + SPARE_BLOCKS < held * SHARE
            streak = self._streaks.setdefault(key, Streak(LOOKS_TO_WARN, LOOKS_TO_CLEAR))
            if streak.observe(short):
                warnings[f"{key[0]} {key[1]}"] = (
                    f"the index has less than half of the blocks that rank {key[1]} of {key[0]}"
                    " reports as cached"
                )
        return warnings
