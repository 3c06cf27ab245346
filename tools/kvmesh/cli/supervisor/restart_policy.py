"""Restart delays and state of a supervised process; no I/O."""

from dataclasses import dataclass, field
from enum import StrEnum


class ProcessState(StrEnum):
    """State of a supervised process."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RestartPolicy:
    """Delays between restarts in seconds: doubled each time, reset by a stable run."""

    first_s: float = 0.1
    max_s: float = 10.0
    stable_s: float = 10.0

    def delay(self, failures: int) -> float:
        """Seconds before the next start, after `failures` (from 1) short runs in a row."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 30))


@dataclass
class ProcessRecord:
    """State of one process across its restarts; `now` is monotonic seconds.

    A run shorter than `policy.stable_s` counts as a failure, whatever its exit status. `joined`:
    the present run has joined the mesh; `failed_starts` are those in a row that ended before.
    """

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    state: ProcessState = ProcessState.STARTING
    pid: int | None = None
    starts: int = 0
    failures: int = 0
    failed_starts: int = 0
    joined: bool = False
    since: float = 0.0

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def started(self, now: float, pid: int | None) -> None:
        """Record the start of a run; `pid` is None if the start failed."""
        self.pid = pid
        self.starts += 1
        self.since = now
        self.joined = False
        self.state = ProcessState.RUNNING

    def stopping(self) -> None:
        """Make the next exit final."""
        self.state = ProcessState.STOPPING if self.pid is not None else ProcessState.STOPPED

    def exited(self, now: float) -> float | None:
        """Record the end of a run; return the seconds before the next start, None if final."""
        self.pid = None
        self.failed_starts = 0 if self.joined else self.failed_starts + 1
        if self.state is ProcessState.STOPPING:
            self.state = ProcessState.STOPPED
            return None
        self.failures = 1 if now - self.since >= self.policy.stable_s else self.failures + 1
        self.state = ProcessState.WAITING
        return self.policy.delay(self.failures)
