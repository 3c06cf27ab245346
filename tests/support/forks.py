"""Starts `kvmesh` processes as copies of one that has imported their code.

Most of the CPU time of a short-lived service is its imports. `Fork` asks a server, one for each
process of the tests, for a copy of itself that runs the command line's module as `python -m` does.
The copy becomes a child of the tests' process, like one that `subprocess` starts.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from kvmesh.settings.load import variables
from support.wait import PATIENCE_S

PROGRAM = "kvmesh.cli.main"
# What services and the commands of most tests import; none of them starts a thread.
IMPORTED = (
    *("kvmesh.cli.registry", "kvmesh.cli.flags", "kvmesh.cli.references.foreign_flags"),
    *(
        f"kvmesh.cli.commands.{name}"
        for name in (
            "run.service",
            "run.up",
            "look.status",
            "look.plan",
            "operate.keys",
            "operate.fleet",
        )
    ),
    *("kvmesh.cli.bus_session", "kvmesh.cli.status.report", "kvmesh.cli.status.view"),
    *(
        f"kvmesh.{role}.service"
        for role in ("frontend", "router", "indexer", "kvbm", "worker", "planner")
    ),
)
MOST_BYTES = 1 << 20
WHOLE_END = "TEST_WHOLE_END"  # in the environment: the interpreter ends, and reports leaks
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.01


class _Order(NamedTuple):
    arguments: list[str]
    env: dict[str, str]
    cwd: str


class Fork:
    """A running `kvmesh` process; the methods are those of `subprocess.Popen`.

    With `stdin` it has a session of its own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        cwd: Path | None = None,
        stdin: IO[bytes] | None = None,
    ) -> None:
        self.args = [*arguments]
        self.returncode: int | None = None
        self._lock = threading.Lock()
        order = _Order(self.args, {**env}, str(cwd or Path.cwd()))
        files = [each.fileno() for each in (stdout, stderr, stdin) if each]
        self.pid = _server().fork(order, *files)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Fork


def start(
    arguments: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    cwd: Path | None = None,
) -> Process:
    """Start a `kvmesh` command; only a new interpreter finds modules that `env` adds."""
    if env.get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
        return Fork(arguments, env, stdout, stderr, cwd)
    command = [sys.executable, "-m", PROGRAM, *arguments]
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, cwd=cwd)


def run(
    arguments: Sequence[str],
    env: Mapping[str, str],
    timeout: float = PATIENCE_S,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a `kvmesh` command to its end; raises TimeoutExpired after `timeout` seconds."""
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        process = Fork(arguments, env, stdout, stderr, cwd)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        texts = []
        for output in (stdout, stderr):
            output.seek(0)
            texts.append(output.read().decode())
        return subprocess.CompletedProcess(process.args, status, *texts)


class _Server:
    """The process that is copied; it ends with its socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=Path(__file__).parent.parent,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, order: _Order, *files: int) -> int:
        """Start a process with these as stdout, stderr and perhaps stdin; returns its id."""
        with self._lock:
            _adopt(True)  # the process between, which the server forks, ends at once
            try:
                socket.send_fds(self._socket, [json.dumps(order).encode()], files)
                answer = self._socket.recv(MOST_BYTES)
            finally:
                _adopt(False)
        if not answer:
            raise RuntimeError(f"the fork server ended with status {self._process.poll()}")
        return int(answer)


_server = cache(_Server)


def _adopt(orphans: bool) -> None:
    """Make orphaned descendants children of this process, or of init as usual."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(requests: socket.socket) -> _Order:
    """Fork a process for each order; returns the order in the new process."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not message:
            sys.exit()
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                break
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        os.close(writer)
        with open(reader, "rb") as answer:
            requests.send(answer.read())
        for file in files:
            os.close(file)
    os.close(reader)
    os.close(writer)
    requests.close()
    if len(files) == 3:
        os.setsid()
    for file, number in zip(files, (1, 2, 0), strict=False):
        os.dup2(file, number)
        os.close(file)
    return _Order(*json.loads(message))


def _main() -> None:
    for module in IMPORTED:
        import_module(module)
    variables()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    sys.path[0] = order.cwd
    sys.argv = [PROGRAM, *order.arguments]
    try:
        runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if WHOLE_END not in os.environ and isinstance(end.code, int | None):
            _end(end.code or 0)
        raise


def _end(status: int) -> None:
    """Exit as the interpreter does, without freeing each imported module."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for output in (sys.stdout, sys.stderr):
        output.flush()
    os._exit(status)


if __name__ == "__main__":
    _main()
