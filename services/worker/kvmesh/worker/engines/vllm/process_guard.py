"""Kills engine processes when this process dies: orphaned engines keep their GPU memory."""

import asyncio
import logging
import subprocess
from collections.abc import Callable, Iterable
from multiprocessing import active_children

import psutil

from kvmesh.bus.errors import cause
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
END_S = 1.0
LOOK_S = 0.5
END = b"end\n"
# Each line has all processes to kill. The input ends without END only if this process has died.
_SCRIPT = """
while read -r line; do [ "$line" = end ] && exit; pids=$line; done
[ -z "$pids" ] || kill -KILL $pids
"""


class ProcessGuard:
    """A shell that kills processes if this process dies without `close`."""

    def __init__(self) -> None:
        self._tasks = BackgroundTasks()
        self._pids: list[int] = []
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def follow(self, roots: Callable[[], Iterable[int]]) -> None:
        """Guard these processes and all that they start, from now on."""
        self._tasks.start(self._follow(roots), "process guard")

    async def close(self) -> None:
        """Stop guarding: the processes have ended or will end by themselves."""
        await self._tasks.close()
        try:
            self._watcher.communicate(END, timeout=END_S)
        except subprocess.TimeoutExpired:  # the shell has been stopped (SIGSTOP)
            self._watcher.kill()
            self._watcher.wait()

    async def _follow(self, roots: Callable[[], Iterable[int]]) -> None:
        while True:
            try:
                self._guard(process_trees(roots()))
            except OSError as error:
                log.warning("vLLM's processes will outlive a killed worker: %s", cause(error))
                return
            await asyncio.sleep(LOOK_S)

    def _guard(self, pids: Iterable[int]) -> None:
        wanted = sorted(pids)
        if wanted != self._pids:
            self._pids = wanted
            assert self._watcher.stdin is not None
            self._watcher.stdin.write(f"{' '.join(map(str, wanted))}\n".encode())


def spawned() -> list[int]:
    """The processes that multiprocessing has started here."""
    return [child.pid for child in active_children() if child.pid is not None]


def process_trees(roots: Iterable[int]) -> list[int]:
    """Processes and their descendants."""
    found: dict[int, None] = {}
    for root in roots:
        try:
            process = psutil.Process(root)
            found |= dict.fromkeys([root, *(p.pid for p in process.children(recursive=True))])
        except psutil.Error:
            continue
    return list(found)
