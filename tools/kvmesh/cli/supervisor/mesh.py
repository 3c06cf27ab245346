"""Starts, supervises and stops the processes of a mesh on one machine, in order."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.forks.server import ServiceForks
from kvmesh.cli.supervisor.plan import START_ORDER, STOP_ORDER, ProcessSpec
from kvmesh.cli.supervisor.process import SupervisedProcess

EARLY_FAILURES = 3
USAGE_ERROR = 2


class StartSteps(Protocol):
    """Hooks of starting and stopping the processes."""

    async def after_nats(self) -> None:
        """Called between the start of the NATS server and that of the services."""

    async def until_ready(self, mesh: "SupervisedMesh") -> None:
        """Return once `mesh` serves; raise UpError if it does not in time."""

    def serves(self) -> bool:
        """True once requests have been served, also before the mesh is ready."""

    def retired(self, name: str) -> None:
        """Called when a process of the start has ended for good: nothing is to wait for it."""

    async def before_stop(self) -> None:
        """Called before the processes are stopped."""


class SupervisedMesh:
    """Supervises the processes of `specs` until a signal, or until the start fails.

    `on_retired` runs with the name of a process that rejects its settings and is not restarted.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        steps: StartSteps,
        log: LogStream,
        stop_timeout_s: float,
        forks: ServiceForks | None = None,
    ) -> None:
        self._steps = steps
        self._log = log
        self._stop_timeout_s = stop_timeout_s
        self._forks = forks
        self._ready = False
        self._stop = asyncio.Event()
        self._failure = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_retired: Callable[[str], None] | None = None
        self.processes = [self._supervised(spec) for spec in specs]

    async def run(self) -> None:
        """Serve until a signal; raises UpError if the mesh does not start."""
        self._watch_signals()
        try:
            await self._unless_stopped(self._start())
            self._ready = True
            await self._stop.wait()
        finally:
            await self._shut_down()
        if self._failure:
            raise UpError(self._failure)

    async def _start(self) -> None:
        for role in START_ORDER:
            for process in self._with_role(role):
                self._spawn(process.run(), process.spec.name)
            if role == "nats":
                await self._steps.after_nats()
        await self._steps.until_ready(self)

    def add(self, spec: ProcessSpec) -> None:
        """Start and supervise a further process, unless the mesh stops."""
        if self._stop.is_set():
            return
        process = self._supervised(spec)
        same = [n for n, other in enumerate(self.processes) if other.spec.role == spec.role]
        self.processes.insert(same[-1] + 1 if same else len(self.processes), process)
        self._spawn(process.run(), spec.name)

    def remove(self, name: str, timeout_s: float, on_end: Callable[[str], None]) -> None:
        """Stop a process for good, killing it after `timeout_s`; then call `on_end` with its name.

        A name that is not known has ended already.
        """
        self._spawn(self._remove(name, timeout_s, on_end), f"end of {name}")

    async def _remove(self, name: str, timeout_s: float, on_end: Callable[[str], None]) -> None:
        for process in [p for p in self.processes if p.spec.name == name]:
            await process.stop(timeout_s)
            self.processes.remove(process)
        on_end(name)

    def _supervised(self, spec: ProcessSpec) -> SupervisedProcess:
        return SupervisedProcess(spec, self._log.line, self._on_exit, self._forks)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

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
        self._log.note("stopping; a second signal kills at once")
        self._stop.set()

    def _on_exit(self, process: SupervisedProcess, status: int) -> None:
        end = f"{process.spec.name} {describe_exit(status)}"
        if not self._ready and self._ends_start(process, status):
            self._give_up(f"{end} before the mesh was ready (see the log above)")
            process.retire()
        elif status == USAGE_ERROR:
            self._log.note(f"{end}; not restarted, since it rejects its settings", "W")
            process.retire()
            self._steps.retired(process.spec.name)
            if self.on_retired is not None:
                self.on_retired(process.spec.name)
        else:
            self._log.note(f"{end}; restarting", "W")

    def _ends_start(self, process: SupervisedProcess, status: int) -> bool:
        """True if this end shows, before the mesh was ready, that it will not become so."""
        record, ran_s = process.record, asyncio.get_running_loop().time() - process.record.since
        if status == USAGE_ERROR and record.starts == 1 and ran_s < record.policy.stable_s:
            return True  # refused at once: settings of the command that was just entered
        # loads of several minutes that end in failure are no stable runs before the mesh was ready
        fatal = status == USAGE_ERROR or record.starts >= EARLY_FAILURES
        return fatal and not self._steps.serves()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._give_up(f"lost control of {task.get_name()}: {task.exception()!r}")

    def _give_up(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._stop.set()

    async def _shut_down(self) -> None:
        await self._steps.before_stop()
        for role in STOP_ORDER:
            await asyncio.gather(*(p.stop(self._stop_timeout_s) for p in self._with_role(role)))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._log.note("stopped")

    def _with_role(self, role: str) -> list[SupervisedProcess]:
        return [process for process in self.processes if process.spec.role == role]


def describe_exit(status: int) -> str:
    """A process's exit in words, from its return code as in `subprocess`."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
