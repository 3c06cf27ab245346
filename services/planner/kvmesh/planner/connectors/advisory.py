"""The connector `advisory`: it logs what it would do, and does nothing."""

import logging
from collections.abc import Sequence

from kvmesh.planner.connectors.interface import PoolState

log = logging.getLogger(__name__)


class AdvisoryConnector:
    """Logs each change once. It knows no place, so it reports no pool."""

    chooses = True

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    async def open(self) -> None:
        """Nothing to reach."""

    async def state(self) -> dict[str, PoolState]:
        """No pool: the planner counts the workers' cards instead."""
        return {}

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        """Log the numbers that differ from the last ones, and the workers to stop."""
        changed = {pool: n for pool, n in pools.items() if self._said.get(pool) != n}
        if not changed:
            return
        self._said |= changed
        numbers = ", ".join(f"{n} workers of pool {pool}" for pool, n in changed.items())
        first = f"; would stop {', '.join(stop)} first" if stop else ""
        log.info("would run %s%s", numbers, first)

    async def close(self) -> None:
        """Nothing to release."""
