"""Guarded processes die with their worker; stopped processes are detected."""

import asyncio
import signal
import subprocess
import sys

import pytest
from support.wait import PATIENCE_S, eventually

from kvmesh.worker.engines.vllm.process_guard import ProcessGuard
from kvmesh.worker.engines.vllm.stopped_processes import any_stopped

PARENT = """
import subprocess, time
from kvmesh.worker.engines.vllm.process_guard import ProcessGuard
guard = ProcessGuard([subprocess.Popen(["sleep", "1000"]).pid])
print("guarded", flush=True)
time.sleep(1000)
"""


def test_guarded_processes_die_with_a_killed_process() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"guarded\n"
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)  # ends when nobody has its output open any more


def test_a_dismissed_guard_kills_nothing() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    ProcessGuard([child.pid]).dismiss()
    assert child.poll() is None
    child.kill()
    child.wait(PATIENCE_S)


def test_a_stopped_guard_can_be_dismissed() -> None:
    psutil = pytest.importorskip("psutil")
    child = subprocess.Popen(["sleep", "1000"])
    guard = ProcessGuard([child.pid])
    [shell] = [p for p in psutil.Process().children() if str(child.pid) in p.cmdline()]
    shell.suspend()
    guard.dismiss()
    assert not shell.is_running()
    assert child.poll() is None
    child.kill()
    child.wait(PATIENCE_S)


def test_a_stopped_process_is_detected() -> None:
    first, second = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    pids = [first.pid, second.pid]
    assert not any_stopped(pids)
    second.send_signal(signal.SIGSTOP)
    asyncio.run(eventually(lambda: any_stopped(pids)))
    second.send_signal(signal.SIGCONT)
    asyncio.run(eventually(lambda: not any_stopped(pids)))
    for process in (first, second):
        process.kill()
        process.wait(PATIENCE_S)
    assert not any_stopped(pids)
