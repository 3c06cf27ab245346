"""One supervised process: start, output, restart, stop; dies with the supervisor."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.cli.supervisor.restart_policy import ProcessRecord, ProcessState

PR_SET_PDEATHSIG = 1
LINE_BYTES = 1 << 16
OUTPUT_S = 1.0
EXEC_FAILED = 127


class SupervisedProcess:
    """Runs `spec` and restarts it until stopped.

    `on_line(spec, text)` receives each line of output, `on_exit(process, status)` each unexpected
    exit with the return code as in `subprocess` (negative: the signal that killed it).
    """

    def __init__(
        self,
        spec: ProcessSpec,
        on_line: Callable[[ProcessSpec, str], None],
        on_exit: Callable[["SupervisedProcess", int], None],
    ) -> None:
        self.spec = spec
        self.record = ProcessRecord()
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
        try:
            transport, child = await self._spawn()
        except OSError as error:
            self._on_line(self.spec, f"cannot start {self.spec.argv[0]}: {error.strerror}")
            self.record.started(loop.time(), None)
            return EXEC_FAILED
        self.record.started(loop.time(), transport.get_pid())
        if self._stop.is_set():
            self._terminate()
        await child.exited.wait()
        self.kill()  # its children, which may hold its output open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_S):
                await child.closed.wait()
        transport.close()
        return transport.get_returncode() or 0

    async def _spawn(self) -> tuple[asyncio.SubprocessTransport, "_Child"]:
        return await asyncio.get_running_loop().subprocess_exec(
            lambda: _Child(lambda line: self._on_line(self.spec, line)),
            *self.spec.argv,
            env=self.spec.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to the process group if it still runs after `timeout_s`."""
        if not self._stop.is_set():  # a second SIGTERM would end a drain
            self._stop.set()
            self._terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            self._on_line(self.spec, f"did not stop within {timeout_s:g} s: killed")
            self.kill()
            await self._done.wait()

    def _terminate(self) -> None:
        self.record.stopping()
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


class _Child(asyncio.SubprocessProtocol):
    """Splits output into lines of at most LINE_BYTES; signals exit and end of output separately."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip())

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest.decode(errors="replace").rstrip())
            self._rest = b""
        self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()


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
