"""The fork servers of a worker whose vLLM starts, as its last start with this cache needed them."""

import json
import logging
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvmesh.worker.engine import EngineContext
from kvmesh.worker.engines.vllm.fork_servers.environments import (
    changed,
    decisive,
    difference,
    fingerprint,
)
from kvmesh.worker.engines.vllm.fork_servers.protocol import FOLDER_OF_REQUESTS
from kvmesh.worker.scratch import ScratchFolder

log = logging.getLogger(__name__)
EXECUTABLE_VARIABLE = "KVMESH_FORK_EXECUTABLE"  # inherited by vLLM's processes
LAUNCHER = "kvmesh.worker.engines.vllm.fork_servers.launcher"
SERVER = "kvmesh.worker.engines.vllm.fork_servers.server"
IMPORTS = ("kvmesh.worker.engines.vllm.fork_servers.imports:import_vllm",)
RECORD = Path("processes", "environments.json")
MAX_RECORD = 1 << 20
STOP_S = 5.0
BACKLOG = 64
Changes = dict[str, str | None]


class ForkServers:
    """Import what vLLM's processes need while this process imports the same.

    `cache` is the folder of the engine's compile cache: which environments vLLM gives to its
    processes is known from the last start that used it, and the first one makes them itself.
    """

    def __init__(self, cache: Path, imports: tuple[str, ...] = IMPORTS) -> None:
        self._record = cache / RECORD
        self._imports = imports
        self._base = dict(os.environ)
        self._scratch: ScratchFolder | None = None
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Begin with the imports; without a server, processes start as usual."""
        try:
            self._scratch = scratch = ScratchFolder()
            (scratch.path / FOLDER_OF_REQUESTS).mkdir(mode=0o700)
            executable = scratch.path / "python"
            executable.write_text(_script(scratch.path))
            executable.chmod(0o700)
            if not os.access(executable, os.X_OK):
                raise PermissionError(f"{scratch.path} is mounted without execution")
            for changes in self._recorded():
                self._start_server(scratch.path, changes)
        except OSError as error:
            log.info("vLLM's processes import everything themselves: %s", error)
            self.close()

    @property
    def processes(self) -> list[int]:
        """The servers' process ids."""
        return [server.pid for server in self._servers]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, processes that multiprocessing spawns come from the servers."""
        if self._scratch is None:
            yield
            return
        before, executable = multiprocessing.spawn.get_executable(), self._scratch.path / "python"
        os.environ[EXECUTABLE_VARIABLE] = str(executable)
        multiprocessing.set_executable(str(executable))
        try:
            yield
        finally:
            os.environ.pop(EXECUTABLE_VARIABLE, None)
            multiprocessing.set_executable(before)

    def remember(self) -> None:
        """vLLM has started: keep the environments of its processes for the next start."""
        if self._scratch is None:
            return
        found: dict[str, Changes] = {}
        for file in sorted((self._scratch.path / FOLDER_OF_REQUESTS).iterdir()):
            with suppress(OSError, ValueError):
                environment: dict[str, str] = json.loads(file.read_bytes())
                found[fingerprint(environment)] = difference(environment, self._base)
        new_record = [found[name] for name in sorted(found)][: _processors()]
        if not found or new_record == self._recorded():
            return
        new = self._record.with_name(f"new.{os.getpid()}.tmp")
        try:
            self._record.parent.mkdir(mode=0o700, exist_ok=True)
            new.write_text(json.dumps(new_record))
            new.rename(self._record)
        except OSError as error:
            log.info("the next start of vLLM has no fork servers: %s", error)

    def close(self) -> None:
        """End the servers; processes of theirs that still run end with them."""
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.close()
        deadline = time.monotonic() + STOP_S
        for server in self._servers:
            try:
                server.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:  # it imports, or has processes that do not end
                server.kill()
                server.wait()
        self._servers.clear()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _recorded(self) -> list[Changes]:
        """At most one for each processor: more would take longer than they save."""
        try:
            if self._record.stat().st_size > MAX_RECORD:
                raise ValueError("it is too large")
            found = msgspec.json.decode(self._record.read_bytes(), type=list[Changes])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.info("%s is not used: %s", self._record, error)
            return []
        return found[: _processors()]

    def _start_server(self, folder: Path, changes: Changes) -> None:
        environment = changed(self._base, decisive(changes))
        flags: list[str] = _flags()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / fingerprint(environment)))
            listener.listen(BACKLOG)  # launchers wait for the imports
            number = listener.fileno()
            command = [sys.executable, *flags, "-m", SERVER, str(number), *self._imports]
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, pass_fds=[number]
            )
        self._servers.append(server)


def begin(context: EngineContext) -> ForkServers | None:
    """The servers for vLLM's start; None without a compile cache, or if the settings say so."""
    if context.compiled is None or not context.settings.vllm.fork_servers:
        return None
    servers = ForkServers(context.compiled)
    servers.start()
    return servers


def adopt() -> None:
    """In a process of vLLM: let those that it spawns come from the same servers."""
    if executable := os.environ.get(EXECUTABLE_VARIABLE):
        multiprocessing.set_executable(executable)


def _processors() -> int:
    return os.cpu_count() or 1


def _script(folder: Path) -> str:
    command = shlex.join([sys.executable, "-m", LAUNCHER, str(folder)])
    return f'#!/bin/sh\nexec {command} "$@"\n'


def _flags() -> Any:
    return multiprocessing.util._args_from_interpreter_flags()  # type: ignore[attr-defined]
