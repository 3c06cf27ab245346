"""A guard outlives its process, and what it guards does not."""

import subprocess
import sys

from support.wait import PATIENCE_S

from kvmesh.worker.vllm.guard import Guard

PARENT = """
import subprocess, time
from kvmesh.worker.vllm.guard import Guard
guard = Guard([subprocess.Popen(["sleep", "1000"]).pid])
print("guarded", flush=True)
time.sleep(1000)
"""


def test_what_is_guarded_dies_with_a_process_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"guarded\n"
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)  # ends when nobody has its output open any more


def test_a_dismissed_guard_kills_nothing() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Guard([child.pid]).dismiss()
    assert child.poll() is None
    child.kill()
    child.wait(PATIENCE_S)
