"""Processes that were stopped, with SIGSTOP or by a shell, and may never go on."""

from collections.abc import Iterable
from pathlib import Path

STOPPED = "T"


def any_stopped(pids: Iterable[int]) -> bool:
    """Whether one of them is; False where the system does not tell (it has no /proc)."""
    return any(_state(pid) == STOPPED for pid in pids)


def _state(pid: int) -> str:
    """The letter behind the name, which is in parentheses and may have some of its own."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
