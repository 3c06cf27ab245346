"""Kills engine processes when this process dies: orphaned engines keep their GPU memory."""

import subprocess
from collections.abc import Iterable

END_S = 1.0
# The input ends without a line only if this process has died.
_SCRIPT = 'read -r _ || kill -KILL "$@"'


class ProcessGuard:
    """A shell that kills the processes `pids` if this process dies without `dismiss`."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", *map(str, pids)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Stop guarding: the processes have ended or will end by themselves."""
        try:
            self._watcher.communicate(b"\n", timeout=END_S)
        except subprocess.TimeoutExpired:  # the shell has been stopped (SIGSTOP)
            self._watcher.kill()
            self._watcher.wait()
