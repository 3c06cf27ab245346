"""Kills engine processes when this process dies: orphaned engines keep their GPU memory."""

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable, Iterable
from multiprocessing import active_children
from typing import IO
from weakref import WeakSet

import psutil

from kvmesh.bus.errors import cause
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
END_S = 1.0
STARTING_S, RUNNING_S = 0.5, 10.0  # between looks at the processes
END = b"end\n"
# Each line has all processes to kill. The input ends without END only if this process has died.
_SCRIPT = """
while read -r line; do [ "$line" = end ] && exit; pids=$line; done
[ -z "$pids" ] || kill -KILL $pids
"""


class ProcessGuard:
    """A shell that kills the processes below some of ours if this one dies without `close`.

    `roots` names ours at each look; looks are frequent until `settled`.
    """

    def __init__(self, roots: Callable[[], Iterable[int]]) -> None:
        self._roots = roots
        self._tasks = BackgroundTasks()
        self._pids: list[int] = []
        self._look_s = STARTING_S
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        os.set_blocking(self._input.fileno(), False)
        _guards.add(self)
        self._tasks.start(self._follow(), "process guard")

    def settled(self) -> None:
        """The processes have started, and change no more."""
        self._look_s = RUNNING_S

    async def close(self) -> None:
        """Stop guarding: the processes have ended or will end by themselves."""
        await self._tasks.close()
        try:
            self._watcher.communicate(END, timeout=END_S)
        except subprocess.TimeoutExpired:  # the shell has been stopped (SIGSTOP)
            self._watcher.kill()
            self._watcher.wait()

    def leave_to_parent(self) -> None:
        """In a forked process: the input must end when the parent dies, so it closes here."""
        self._input.close()

    async def _follow(self) -> None:
        while True:
            try:
                found = sorted(await asyncio.to_thread(process_trees, list(self._roots())))
                if found != self._pids:
                    self._input.write(f"{' '.join(map(str, found))}\n".encode())
                    self._pids = found
            except ValueError:  # a process ended just now, and multiprocessing has forgotten it
                pass
            except OSError as error:
                log.warning("vLLM's processes will outlive a killed worker: %s", cause(error))
                return
            await asyncio.sleep(self._look_s)

    @property
    def _input(self) -> IO[bytes]:
        assert self._watcher.stdin is not None
        return self._watcher.stdin


_guards: WeakSet[ProcessGuard] = WeakSet()


def _leave_to_parent() -> None:
    for guard in list(_guards):
        guard.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def spawned() -> list[int]:
    """The processes that multiprocessing has started here."""
    return [child.pid for child in active_children() if child.pid is not None]


def process_trees(roots: Iterable[int]) -> list[int]:
    """Those of these processes that exist, and their descendants; ours are children of this one."""
    found = {root for root in roots if psutil.pid_exists(root)}
    try:
        below = [(each.pid, each.ppid()) for each in psutil.Process().children(recursive=True)]
    except psutil.Error as error:
        log.debug("cannot list the processes below this one: %s", error)
        return list(found)
    while more := {pid for pid, parent in below if parent in found} - found:
        found |= more
    return list(found)
