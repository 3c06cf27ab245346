"""Asks an oracle to simulate candidate fleets, in the background."""

import asyncio
import logging
from collections.abc import Callable
from math import inf

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NoResponder, cause
from kvmesh.bus.messages import FleetAnswer, FleetQuestion, MessageDecoder
from kvmesh.planner import metrics
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.warnings import Warnings

log = logging.getLogger(__name__)
GRACE_S = 5.0  # beyond the budget of a question
RETRY_S = 5.0
_answers = MessageDecoder(FleetAnswer)


class OracleClient:
    """One question at a time. After a failure, none is asked for RETRY_S seconds.

    A failure is a warning until a later question is answered.
    """

    def __init__(self, bus: Bus, warnings: Warnings) -> None:
        self._bus = bus
        self._warnings = warnings
        self._tasks = BackgroundTasks()
        self._failed_at = -inf

    @property
    def ready(self) -> bool:
        """True if a question may be asked now."""
        return not len(self._tasks) and self._now() - self._failed_at >= RETRY_S

    def ask(
        self, question: FleetQuestion, answered: Callable[[FleetQuestion, FleetAnswer], None]
    ) -> None:
        """Ask; `answered` gets the answer, unless there is none."""
        self._tasks.start(self._ask(question, answered), "oracle")

    async def close(self) -> None:
        await self._tasks.close()

    async def _ask(
        self, question: FleetQuestion, answered: Callable[[FleetQuestion, FleetAnswer], None]
    ) -> None:
        subject = self._bus.subjects.oracle
        try:
            answer = await self._bus.request(
                subject, question, _answers, question.budget_s + GRACE_S
            )
            reason = answer.error
        except NoResponder:
            reason = "none is running"
        except BusError as error:
            reason = cause(error)
        failed = {"": f"fleets are not simulated: {reason}"} if reason else {}
        self._warnings.update("oracle", failed)
        metrics.oracle_answers.labels("failed" if failed else "answered").inc()
        if failed:
            self._failed_at = self._now()
        else:
            answered(question, answer)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
