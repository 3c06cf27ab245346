"""Times of this process's beginning, on the monotonic clock; imported first of all by programs."""

import os
import time
from pathlib import Path

FIRST_LINE = time.monotonic()
_STARTED = 19  # field of /proc/PID/stat, counted after the name of the program


def process_created() -> float:
    """The time at which the system created this process; FIRST_LINE where it does not tell.

    A program that a shell replaced itself with was created as that shell. A fork is created after
    FIRST_LINE, which is that of its parent.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return FIRST_LINE
    return time.monotonic() - age_s
