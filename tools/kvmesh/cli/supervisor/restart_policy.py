"""When a process is started again: the pure part of supervision."""

from dataclasses import dataclass, field
from enum import StrEnum


class ProcessState(StrEnum):
    """Where a supervised process is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RestartPolicy:
    """Delays in seconds between restarts: doubled each time, forgotten after a stable run."""

    first_s: float = 0.1
    most_s: float = 10.0
    stable_s: float = 10.0

    def delay(self, failures: int) -> float:
        """How long to wait before the next start, after `failures` (from 1) short runs in a row."""
        return min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))


@dataclass
class Life:
    """One process over its restarts; `now` is monotonic seconds.

    A run shorter than `policy.stable_s` counts as a failure, whatever its exit status.
    """

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    state: ProcessState = ProcessState.STARTING
    pid: int | None = None
    starts: int = 0
    failures: int = 0
    since: float = 0.0

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def started(self, now: float, pid: int | None) -> None:
        """A run began; without `pid` it could not even be started."""
        self.pid = pid
        self.starts += 1
        self.since = now
        self.state = ProcessState.RUNNING

    def stopping(self) -> None:
        """From now on an exit is final."""
        self.state = ProcessState.STOPPING if self.pid is not None else ProcessState.STOPPED

    def exited(self, now: float) -> float | None:
        """Record the end of a run; returns the seconds to wait before the next, None if never."""
        self.pid = None
        if self.state is ProcessState.STOPPING:
            self.state = ProcessState.STOPPED
            return None
        self.failures = 1 if now - self.since >= self.policy.stable_s else self.failures + 1
        self.state = ProcessState.WAITING
        return self.policy.delay(self.failures)
