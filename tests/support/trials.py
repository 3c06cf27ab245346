"""Constraint trial processes beside workers."""

from pathlib import Path


def trial_process(worker: int) -> int:
    """The pid of a worker's trial process; raises AssertionError if it has none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if parent == worker and any(part.endswith(b".trial") for part in command):
            return int(folder.name)
    raise AssertionError(f"no child of {worker} is a constraint trial process")


def is_running(pid: int) -> bool:
    """True while a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
