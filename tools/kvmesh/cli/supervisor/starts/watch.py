"""Bounds a start by the time in which it makes no progress, and tells what starts meanwhile."""

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import CARDLESS, ProcessSpec
from kvmesh.cli.supervisor.restart_policy import ProcessState
from kvmesh.cli.supervisor.starts.progress import StartProgress, describe_starts

if TYPE_CHECKING:
    from kvmesh.bus.messages import Starting
    from kvmesh.cli.supervisor.mesh import SupervisedMesh
    from kvmesh.cli.supervisor.mesh_view import MeshView

TELL_S = 10.0
OPTION = "up.ready_timeout_s (--ready-timeout-s) sets it"


class StartWatch:
    """Logs every TELL_S seconds which processes start and their phases, from `open` to `close`.

    It follows the processes of `mesh` once it is set, also those that start or restart when the
    mesh is ready.
    """

    def __init__(self, timeout_s: float, log: LogStream) -> None:
        self.mesh: SupervisedMesh | None = None
        self._timeout_s = timeout_s
        self._log = log
        self._view: MeshView | None = None
        self._progress = StartProgress()
        self._deadline: asyncio.Timeout | None = None
        self._waits_for = ""
        self._telling: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to tell, and to read the output of processes as signs of progress."""
        self._log.on_line = self._on_line
        self._telling = asyncio.create_task(self._tell(), name="progress of starts")

    def attach(self, view: "MeshView") -> None:
        """Follow the starts and leases of the mesh."""
        self._view = view
        view.on_starting = self._on_starting
        view.on_joined = self._on_joined

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})

    async def in_time(self, work: Coroutine[Any, Any, None], waits_for: str = "") -> None:
        """Await a part of the start; raises UpError after a time without progress.

        `waits_for` names the part, unless the view or the processes that have not joined do.
        """
        self._waits_for = waits_for
        try:
            async with asyncio.timeout(self._timeout_s) as self._deadline:
                await work
        except TimeoutError:
            missing = self._describe(asyncio.get_running_loop().time())
            raise UpError(
                f"not ready within {self._timeout_s:g} s; missing: {missing}. Nothing progressed in"
                f" this time (see the log above): {OPTION}"
            ) from None
        finally:
            self._deadline = None
        self._waits_for = ""

    def _on_joined(self) -> None:
        waiting = self._starting()
        for process in self.mesh.processes if self.mesh is not None else ():
            if process.spec.name not in waiting:
                process.record.joined = True
        self._put_off()

    def _put_off(self) -> None:
        """The start makes progress: the time without any begins anew."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    def _on_starting(self, starting: "Starting") -> None:
        now = asyncio.get_running_loop().time()
        if self._progress.on_starting(starting, now, time.time()):
            self._put_off()

    def _on_line(self, spec: ProcessSpec) -> None:
        if spec.role == "worker":
            self._progress.sign(spec.name, asyncio.get_running_loop().time())
            if spec.name in self._starting():
                self._put_off()

    async def _tell(self) -> None:
        """Log what starts, until cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            now = asyncio.get_running_loop().time()
            if awaited := self._describe(now):
                self._log.note(f"waiting for {awaited}")
            for each in self._progress.stalled(self._starting(), self._timeout_s, now):
                text = f"{each.name} makes no progress for {self._timeout_s:g} s and goes on"
                self._log.note(f"{text}: {OPTION}", "W")

    def _describe(self, now: float) -> str:
        """The processes and things that are awaited; empty if there are none."""
        awaited = self._progress.awaited(self._starting(), now)
        other = self._view.waits_for if self._view is not None else ""
        return describe_starts(awaited, self._waits_for or other)

    def _starting(self) -> dict[str, float]:
        """The times at which the processes that have not joined were last started, by name."""
        if self.mesh is None:
            return {}
        now = asyncio.get_running_loop().time()
        running = {
            process.spec.name: process.record.since or now
            for process in self.mesh.processes
            if process.record.state not in (ProcessState.STOPPING, ProcessState.STOPPED)
            and process.spec.role not in CARDLESS
        }
        joined = self._view.joined if self._view is not None else {}
        return {
            name: since
            for name, since in sorted(running.items())
            if not self._progress.has_joined(name, since, joined.get(name, ()))
        }
