"""What must not outlive this process, however it ends: an engine left behind keeps its memory."""

import subprocess
from collections.abc import Iterable

END_S = 1.0
# Its input ends without a line only if whoever could write one is dead.
_SCRIPT = 'read -r _ || kill -KILL "$@"'


class ProcessGuard:
    """Kills the processes `pids` once this process has died without `dismiss`."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._waiting = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", *map(str, pids)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """They have ended, or end by themselves."""
        try:
            self._waiting.communicate(b"\n", timeout=END_S)
        except subprocess.TimeoutExpired:  # it has been stopped
            self._waiting.kill()
            self._waiting.wait()
