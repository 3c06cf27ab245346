"""Times of a process's beginning."""

import subprocess
import sys
import time

CODE = """
import time
from kvmesh.runtime.process_start import FIRST_LINE, process_created
now = time.monotonic()
print(process_created(), FIRST_LINE, now)
"""


def test_a_process_was_created_before_its_first_line() -> None:
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    created, first_line, now = map(float, done.stdout.split())
    assert before - 0.02 <= created <= first_line + 0.02  # the system counts in hundredths
    assert first_line < now < time.monotonic()
