"""Whether the index knows less of a rank than its worker says it holds."""

from collections.abc import Mapping

from kvmesh.bus.messages import Load
from kvmesh.runtime.warnings import Streak

SHARE = 0.5
SPARE_BLOCKS = 64
ON_LOOKS = 10
OFF_LOOKS = 2


class Shortfall:
    """Compares, once a second, the blocks of each rank here with what the workers last said."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], int] = {}
        self._streaks: dict[tuple[str, int], Streak] = {}

    def take(self, load: Load) -> None:
        """Take in a report; blocks in use may not be full, those that are kept are."""
        self._held[load.instance, load.rank] = load.cached_blocks

    def forget(self, instance: str) -> None:
        """Its worker is gone."""
        for key in [key for key in self._held if key[0] == instance]:
            del self._held[key]
            self._streaks.pop(key, None)

    def look(self, indexed: Mapping[tuple[str, int], int]) -> dict[str, str]:
        """The ranks of which the index has known too little for a while, each with a line."""
        found = {}
        for key, held in self._held.items():
            short = indexed.get(key, 0) + SPARE_BLOCKS < held * SHARE
            streak = self._streaks.setdefault(key, Streak(ON_LOOKS, OFF_LOOKS))
            if streak.observe(short):
                found[f"{key[0]} {key[1]}"] = (
                    f"the index knows less than half of the blocks that rank {key[1]} of {key[0]}"
                    " says it keeps"
                )
        return found
