"""Starts, supervises and stops the processes of a mesh on one machine, in order."""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.forks.server import ServiceForks
from kvmesh.cli.supervisor.nats import DISK_FULL, has_room
from kvmesh.cli.supervisor.plan import CARDLESS, START_ORDER, STOP_ORDER, ProcessSpec
from kvmesh.cli.supervisor.process import SupervisedProcess

EARLY_FAILURES = 3
FIRST_STARTED = ("frontend",)  # their successors share the port meanwhile
OWN_PROGRAM = ""
USAGE_ERROR = 2
ROOM_S = 5.0  # between looks for room on the disk of the NATS server


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
        self._stores_nothing = False  # the NATS server: its disk was full
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_retired: Callable[[str], None] | None = None
        self._trials: dict[SupervisedProcess, asyncio.Future[str]] = {}
        self._first: dict[str, ProcessSpec] = {}
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

    def runs(self, name: str) -> bool:
        """True if there is a process of that name."""
        return any(process.spec.name == name for process in self.processes)

    def role_of(self, name: str) -> str:
        """The role of the process of that name; raises StopIteration if there is none."""
        return next(process.spec.role for process in self.processes if process.spec.name == name)

    async def replace(
        self, name: str, program: str, timeout_s: float, joined: Coroutine[Any, Any, None]
    ) -> None:
        """Put a new process in the place of another one, and return once it has `joined`.

        It runs `program`, the Python interpreter of an installation, or OWN_PROGRAM. The old one
        is killed if it has not stopped within `timeout_s` seconds. Raises UpError if the new one
        does not join; then a process runs what the old one ran.
        """
        old = next(process for process in self.processes if process.spec.name == name)
        overlaps = old.spec.role in FIRST_STARTED
        joining = asyncio.create_task(joined, name=f"{name} joins")
        if not overlaps:
            await old.stop(timeout_s)
        spec = self._with_program(self._first.setdefault(name, old.spec), program)
        new = self._put(spec, old, keep=overlaps)
        failure = ""
        if new is not None:
            failed = self._trials[new] = asyncio.get_running_loop().create_future()
            ended = asyncio.create_task(new.ended.wait())
            try:
                await asyncio.wait({joining, failed, ended}, return_when=asyncio.FIRST_COMPLETED)
                failure = failed.result() if failed.done() else ""
                if not failure and not joining.done():
                    failure = f"{name} was stopped before it joined"
            finally:
                ended.cancel()
                joining.cancel()
                del self._trials[new]
            await self._settle(old, new, timeout_s, failure)
        joining.cancel()
        if failure:
            raise UpError(failure)

    async def _settle(
        self, old: SupervisedProcess, new: SupervisedProcess, timeout_s: float, failure: str
    ) -> None:
        """End the old process, or the new one that has failed."""
        overlaps = old in self.processes
        if not failure:
            await old.stop(timeout_s)
        elif new in self.processes:
            await new.stop(timeout_s)
            if not overlaps:
                self._put(old.spec, new, keep=False)
        leaving = new if failure else old
        if leaving in self.processes:
            self.processes.remove(leaving)

    def _with_program(self, spec: ProcessSpec, program: str) -> ProcessSpec:
        if program == OWN_PROGRAM:
            return spec
        return dataclasses.replace(spec, argv=(program, *spec.argv[1:]), modules=())

    def _put(
        self, spec: ProcessSpec, old: SupervisedProcess, keep: bool
    ) -> SupervisedProcess | None:
        """Start a process in the place of `old`, or behind it; None if it must not start."""
        if self._stop.is_set() or old not in self.processes:
            return None
        new, place = self._supervised(spec), self.processes.index(old)
        self.processes[place + keep : place + 1] = [new]
        self._spawn(new.run(), spec.name)
        return new

    def _supervised(self, spec: ProcessSpec) -> SupervisedProcess:
        on_line = self._on_nats_line if spec.role == "nats" else self._log.line
        return SupervisedProcess(spec, on_line, self._on_exit, self._forks)

    def _on_nats_line(self, spec: ProcessSpec, line: str) -> None:
        self._log.line(spec, line)
        if DISK_FULL in line and not self._stores_nothing:
            self._stores_nothing = True
            self._spawn(self._restart_nats(), "restart of NATS")

    async def _restart_nats(self) -> None:
        """Once its disk has room: a server whose disk was full stores nothing until a restart."""
        (server,) = self._with_role("nats")
        while await self._goes_on(ROOM_S):
            if has_room(server.spec):
                self._log.note("the disk of NATS was full and has room: restarting the server", "W")
                server.end()
                break
        await self._goes_on(ROOM_S)  # until it has logged its last
        self._stores_nothing = False

    async def _goes_on(self, wait_s: float) -> bool:
        """Wait; False, maybe earlier, if the mesh stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stop.wait()
        return not self._stop.is_set()

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
        trial = self._trials.get(process)
        if trial is not None:
            if self._is_fatal(process, status) and not trial.done():
                process.retire()
                trial.set_result(f"{end} before it joined (see the log of kvmesh up)")
            self._log.note(end, "W")
        elif not self._ready and self._ends_start(process, status):
            tries = process.record.failed_starts
            times = f", in each of {tries} starts" if tries > 1 else ""
            reason = f": {process.error}" if process.error else " (see the log above)"
            self._give_up(f"{end} before the mesh was ready{times}{reason}")
            process.retire()
        elif status == USAGE_ERROR:
            self._log.note(f"{end}; not restarted, since it rejects its settings", "W")
            process.retire()
            self._steps.retired(process.spec.name)
            if self.on_retired is not None:
                self.on_retired(process.spec.name)
        else:
            self._log.note(f"{end}; restarting{_in_vain(process)}", "W")

    def _ends_start(self, process: SupervisedProcess, status: int) -> bool:
        """True if this end shows, before the mesh was ready, that it will not become so."""
        record, ran_s = process.record, asyncio.get_running_loop().time() - process.record.since
        if status == USAGE_ERROR and record.starts == 1 and ran_s < record.policy.stable_s:
            return True  # refused at once: settings of the command that was just entered
        return self._is_fatal(process, status) and not self._steps.serves()

    def _is_fatal(self, process: SupervisedProcess, status: int) -> bool:
        """True if the process will not serve, however often it is started.

        Loads of several minutes that end in failure are no stable runs.
        """
        return status == USAGE_ERROR or process.record.starts >= EARLY_FAILURES

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


def _in_vain(process: SupervisedProcess) -> str:
    """The number of starts in a row that have failed, and why, once there are some."""
    tries = process.record.failed_starts
    if process.spec.role in CARDLESS or tries < EARLY_FAILURES:
        return ""
    reason = f": {process.error}" if process.error else ""
    return f", though {tries} starts in a row have failed{reason}"


def describe_exit(status: int) -> str:
    """A process's exit in words, from its return code as in `subprocess`."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
