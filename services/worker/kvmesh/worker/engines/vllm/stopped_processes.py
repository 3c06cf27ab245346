"""Detects processes stopped by SIGSTOP or a shell, which may never continue."""

from collections.abc import Iterable
from pathlib import Path

STOPPED = "T"


def any_stopped(pids: Iterable[int]) -> bool:
    """True if one of the processes is stopped; False on systems without /proc."""
    return any(_state(pid) == STOPPED for pid in pids)


def _state(pid: int) -> str:
    """State letter after the process name, which is in parentheses and may contain some."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
