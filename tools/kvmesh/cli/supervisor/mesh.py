"""A mesh on one machine: its processes started, watched, announced and stopped in order."""

import asyncio
import signal
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import START_ORDER, STOP_ORDER, Spec
from kvmesh.cli.supervisor.process import Supervised

EARLY_FAILURES = 3
USAGE_ERROR = 2


class StartSteps(Protocol):
    """What happens around the life of the processes."""

    async def after_nats(self) -> None:
        """Between the start of the NATS server and that of everything else."""

    async def settle(self) -> None:
        """Return once the mesh serves; raise UpError if it will not."""

    async def leave(self) -> None:
        """Before the processes are stopped."""


class Mesh:
    """The processes of `specs` under supervision, until a signal or until it cannot start."""

    def __init__(
        self, specs: Iterable[Spec], steps: StartSteps, log: LogStream, patience_s: float
    ) -> None:
        self._steps = steps
        self._log = log
        self._patience_s = patience_s
        self._ready = False
        self._stop = asyncio.Event()
        self._trouble = ""
        self._runs: list[asyncio.Task[None]] = []
        self.processes = [Supervised(spec, log.line, self._on_exit) for spec in specs]

    async def run(self) -> None:
        """Serve until told to stop; raises UpError if the mesh does not come up."""
        self._watch_signals()
        try:
            await self._unless_stopped(self._start())
            self._ready = True
            await self._stop.wait()
        finally:
            await self._shut_down()
        if self._trouble:
            raise UpError(self._trouble)

    async def _start(self) -> None:
        for role in START_ORDER:
            for process in self._of(role):
                self._runs.append(asyncio.create_task(process.run(), name=process.spec.name))
                self._runs[-1].add_done_callback(self._on_run_end)
            if role == "nats":
                await self._steps.after_nats()
        await self._steps.settle()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            stopped.cancel()
            await working
        else:
            working.cancel()
            await asyncio.wait({working})

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not under nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for process in self.processes:
                process.abort()
            return
        self._log.note("stopping; once more to stop at once")
        self._stop.set()

    def _on_exit(self, process: Supervised, status: int) -> None:
        end = f"{process.spec.name} {describe_exit(status)}"
        hopeless = status == USAGE_ERROR or process.life.failures >= EARLY_FAILURES
        if hopeless and not self._ready:
            self._give_up(f"{end} before the mesh was ready (see the log above)")
        elif status == USAGE_ERROR:
            self._log.note(f"{end}; starting it again would not help", "W")
            process.retire()
        else:
            self._log.note(f"{end}; starting it again", "W")

    def _on_run_end(self, run: asyncio.Task[None]) -> None:
        if not run.cancelled() and run.exception() is not None:
            self._give_up(f"lost control of {run.get_name()}: {run.exception()!r}")

    def _give_up(self, trouble: str) -> None:
        self._trouble = self._trouble or trouble
        self._stop.set()

    async def _shut_down(self) -> None:
        await self._steps.leave()
        for role in STOP_ORDER:
            await asyncio.gather(*(p.stop(self._patience_s) for p in self._of(role)))
        await asyncio.gather(*self._runs, return_exceptions=True)
        self._log.note("stopped")

    def _of(self, role: str) -> list[Supervised]:
        return [process for process in self.processes if process.spec.role == role]


def describe_exit(status: int) -> str:
    """What became of a process, from its status as of `subprocess`."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
