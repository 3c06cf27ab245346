"""One supervised process: start, output, restart, stop; dies with the supervisor."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from kvmesh.cli.supervisor.console import logged_error
from kvmesh.cli.supervisor.forks.server import ServiceForks
from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.cli.supervisor.restart_policy import ProcessRecord, ProcessState

PR_SET_PDEATHSIG = 1
LINE_BYTES = 1 << 16
OUTPUT_S = 1.0
BAR_S = 5.0  # between two states of a progress bar, which overwrites its line
EXEC_FAILED = 127
HURRIED = ("frontend",)  # a second SIGTERM ends their running requests, a third one the process


class Child(Protocol):
    """A running child process."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int:
        """Return the return code as in `subprocess` once the process has ended."""
        ...


class SupervisedProcess:
    """Runs `spec` and restarts it until stopped, as a fork if `forks` can make it.

    `error` is the last error that the present or latest run has logged.

    `on_line(spec, text)` receives each line of output, `on_exit(process, status)` each unexpected
    exit with the return code as in `subprocess` (negative: the signal that killed it).
    """

    def __init__(
        self,
        spec: ProcessSpec,
        on_line: Callable[[ProcessSpec, str], None],
        on_exit: Callable[["SupervisedProcess", int], None],
        forks: ServiceForks | None = None,
    ) -> None:
        self.spec = spec
        self._forks = forks
        self.record = ProcessRecord()
        self.error = ""
        self._on_line = on_line
        self._on_exit = on_exit
        self._stop = asyncio.Event()
        self._done = asyncio.Event()
        self._done.set()

    async def run(self) -> None:
        """Start, wait, restart after a delay; return once stopped."""
        loop = asyncio.get_running_loop()
        self._done.clear()
        try:
            while not self._stop.is_set():
                status = await self._run_once()
                delay = self.record.exited(loop.time())
                if delay is None:
                    return
                self._on_exit(self, status)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._stop.wait()
        finally:
            self.record.state = ProcessState.STOPPED
            self._done.set()

    async def _run_once(self) -> int:
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        self.error = ""
        lines = _Lines(self._take_line)
        reading, _ = await loop.connect_read_pipe(lambda: lines, os.fdopen(reader, "rb", 0))
        try:
            child = await self._start(writer)
        except OSError as error:
            self._on_line(self.spec, f"cannot start {self.spec.argv[0]}: {error.strerror}")
            self.record.started(loop.time(), None)
            reading.close()
            return EXEC_FAILED
        finally:
            os.close(writer)
        self.record.started(loop.time(), child.pid)
        if self._stop.is_set():
            self._terminate()
        status = await child.wait()
        self.kill()  # its children, which may hold its output open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_S):
                await lines.ended.wait()
        reading.close()
        return status

    def _take_line(self, line: str) -> None:
        self.error = logged_error(line) or self.error
        self._on_line(self.spec, line)

    async def _start(self, output: int) -> Child:
        if self._forks is not None and self.spec.modules:
            pid = self._forks.fork(self.spec, output)
            if pid is not None:
                return AdoptedChild(pid)
        return await asyncio.create_subprocess_exec(
            *self.spec.argv,
            env=self.spec.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to the process group if it still runs after `timeout_s`."""
        if not self._stop.is_set():  # a second SIGTERM would end a drain
            self._stop.set()
            self._terminate()
        hurries = self.spec.role in HURRIED
        if hurries and not await self._ended(timeout_s / 2):
            self._terminate()  # answers that still run end with an error, before the process does
        if not await self._ended(timeout_s / 2 if hurries else timeout_s):
            self._on_line(self.spec, f"did not stop within {timeout_s:g} s: killed")
            self.kill()
            await self._done.wait()

    async def _ended(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            return False
        return True

    @property
    def ended(self) -> asyncio.Event:
        """Set while no process runs and none is to be started."""
        return self._done

    def _terminate(self) -> None:
        self.record.stopping()
        self.end()

    def end(self) -> None:
        """Send SIGTERM; the process starts again unless it is being stopped."""
        if self.record.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.record.pid, signal.SIGTERM)

    def retire(self) -> None:
        """Do not restart the process, which has ended."""
        self._stop.set()

    def abort(self) -> None:
        """Kill the process group now and do not restart it."""
        self._stop.set()
        self.record.stopping()
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process group."""
        if self.record.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.record.pid, signal.SIGKILL)


class AdoptedChild:
    """A child of this process that another one has made (Linux)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        ending = os.pidfd_open(pid)
        self._loop.add_reader(ending, self._on_end, ending)

    async def wait(self) -> int:
        return await self._status

    def _on_end(self, ending: int) -> None:
        self._loop.remove_reader(ending)
        os.close(ending)
        self._status.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


class _Lines(asyncio.Protocol):
    """Splits output into lines of at most LINE_BYTES; `ended` is set at its end.

    Of a line that overwrites itself, as a progress bar does, it passes on the state that is shown
    every BAR_S seconds, and the last one.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._clock = asyncio.get_running_loop().time
        self._bar_at = -BAR_S
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)
        if b"\r" in self._rest[:-1]:
            over = b"\r" if self._rest.endswith(b"\r") else b""
            self._rest = b"\r" + _shown(self._rest) + over
            if self._clock() - self._bar_at >= BAR_S:
                self._bar_at = self._clock()
                self._pass_on(self._rest)

    def connection_lost(self, _: Exception | None) -> None:
        if self._rest:
            self._pass_on(self._rest)
            self._rest = b""
        self.ended.set()

    def _pass_on(self, line: bytes) -> None:
        self._on_line(_shown(line).decode(errors="replace"))


def _shown(line: bytes) -> bytes:
    """The text that a terminal shows of a line."""
    return line.rstrip().rpartition(b"\r")[2]


def _die_with(parent: int) -> Callable[[], None] | None:
    """A `preexec_fn` that makes the kernel kill the child when `parent` dies.

    Linux only; elsewhere the children of a killed supervisor survive.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
