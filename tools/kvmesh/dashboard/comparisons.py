"""Comparisons of past requests under other configurations: captured here, simulated in a process.

One runs at a time, so that viewers take at most one core from the mesh.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Instance, MessageDecoder
from kvmesh.dashboard.state.whatif import Compared, WhatIf
from kvmesh.runtime.piped_process import PipedProcess
from kvmesh.settings import Settings
from kvmesh.simulator.whatif.comparison import Alternative, LiveConfiguration, WhatIfAnswer
from kvmesh.simulator.whatif.process import (
    MODULE,
    ComparisonFailure,
    ComparisonProgress,
    ComparisonTask,
    Reply,
)
from kvmesh.workload.capture import CaptureEnd, CaptureError, read_routes

MOST_WAITING = 4
MOST_REQUESTS = 5_000
_replies: MessageDecoder[Reply] = MessageDecoder(Reply)
Report = Callable[[str, float], None]


class ComparisonError(Exception):
    """A comparison without a result; the message is for the viewer."""


class Comparisons:
    """Compares for one viewer after the other."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._settings = settings
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def compare(self, question: WhatIf, workers: list[Instance], report: Report) -> Compared:
        """Capture the requests of the question and simulate them; raises ComparisonError.

        `report` gets the present step in words, and the share of the simulations that is done.
        """
        if self._waiting >= MOST_WAITING:
            raise ComparisonError(
                f"{MOST_WAITING} other comparisons wait already: try again later."
            )
        self._waiting += 1
        try:
            if self._turn.locked():
                report("Waiting for the comparison of another page.", 0.0)
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._compare(question, workers, report)
        finally:
            self._turn.release()

    async def _compare(self, question: WhatIf, workers: list[Instance], report: Report) -> Compared:
        report("Reading the requests of this time.", 0.0)
        own = self._settings.dashboard
        end = CaptureEnd(question.until, MOST_REQUESTS, own.window_bytes)
        messages: list[bytes] = []
        since = datetime.fromtimestamp(question.since, UTC)
        try:
            await read_routes(self._bus, since, question.model, messages.append, end, own.whatif_s)
        except (CaptureError, BusError) as error:
            raise ComparisonError(f"The requests cannot be read: {cause(error)}") from error
        settings = self._settings
        task = ComparisonTask(
            messages=messages,
            live=LiveConfiguration(
                workers=workers,
                router=settings.router,
                mock=msgspec.structs.replace(settings.mock, speedup=question.speedup),
            ),
            other=Alternative(
                policy=question.policy, workers=question.workers, blocks=question.blocks
            ),
        )
        return Compared(question, await self._simulate(task, report), end.requests, end.cut)

    async def _simulate(self, task: ComparisonTask, report: Report) -> WhatIfAnswer:
        report("Starting the simulation.", 0.0)
        limit_s = self._settings.dashboard.whatif_s
        process = PipedProcess(MODULE)
        try:
            async with asyncio.timeout(limit_s):
                await process.send(msgspec.msgpack.encode(task))
                while True:
                    reply = _replies.decode(await process.receive())
                    if isinstance(reply, WhatIfAnswer):
                        return reply
                    if isinstance(reply, ComparisonFailure):
                        raise ComparisonError(f"Nothing was simulated: {reply.reason}")
                    _tell(reply, report)
        except TimeoutError:
            raise ComparisonError(
                f"The simulation took longer than {limit_s:g} s (dashboard.whatif_s) and was"
                " ended: choose a shorter time."
            ) from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise ComparisonError(
                f"The simulating process failed: {type(error).__name__}"
            ) from error
        finally:
            await process.close()


def _tell(progress: ComparisonProgress, report: Report) -> None:
    before = 0.0 if progress.name == "present" else 0.5
    done = progress.done / max(progress.total, 1)
    report(
        f"Simulating the {progress.name} configuration: {progress.done:,} of"
        f" {progress.total:,} requests.",
        before + done / 2,
    )
