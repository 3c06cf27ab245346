"""Has decisions carried out: one change of the fleet at a time, through the connector."""

import asyncio
import logging
from collections.abc import Sequence

from kvmesh.planner import metrics
from kvmesh.planner.actions import ScaleFleet
from kvmesh.planner.connectors.interface import Connector, ConnectorError, PoolState
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.warnings import Warnings

log = logging.getLogger(__name__)
FORGET_S = 300.0


class FleetDriver:
    """Calls the connector. While a change is under way, no other one begins.

    A failed change is a warning until one succeeds, the place shows what was asked for, or none
    has failed for FORGET_S seconds; the next interval tries again.
    """

    def __init__(self, connector: Connector, warnings: Warnings) -> None:
        self._connector = connector
        self._warnings = warnings
        self._tasks = BackgroundTasks()
        self._changing = False
        self._opened = False
        self._asked: dict[str, int] = {}
        self._failed_at = 0.0
        self.failed = False

    @property
    def changing(self) -> bool:
        return self._changing

    async def state(self) -> dict[str, PoolState] | None:
        """The pools as the place reports them; None, with a warning, if it does not."""
        try:
            if not self._opened:
                await self._connector.open()
                self._opened = True
            found = await self._connector.state()
        except ConnectorError as error:
            self._warn(error)
            return None
        if self.failed:
            as_asked = all(p in found and found[p].wanted == n for p, n in self._asked.items())
            self.failed = not as_asked and self._now() - self._failed_at < FORGET_S
        if not self.failed:
            self._warnings.update("connector", {})
        return found

    def start_change(self, change: ScaleFleet) -> None:
        """Set the numbers of workers in the background."""
        self._changing = True
        self._asked = change.pools
        self._tasks.start(self._change(change.pools, change.stop), "scaling")

    async def close(self) -> None:
        await self._tasks.close()
        await self._connector.close()

    async def _change(self, pools: dict[str, int], stop: Sequence[str]) -> None:
        try:
            await self._connector.scale(pools, stop)
            self.failed = False
            self._warnings.update("connector", {})
        except ConnectorError as error:
            self.failed, self._failed_at = True, self._now()
            metrics.connector_errors.inc()
            self._warn(error)
        except asyncio.CancelledError:
            log.info("the planner stops while a change of the fleet is under way")
            raise
        finally:
            self._changing = False

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _warn(self, error: ConnectorError) -> None:
        self._warnings.update("connector", {"": f"cannot change the fleet: {error}"})
