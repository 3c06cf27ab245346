"""The watchdog ends a process whose event loop hangs, but not one that was stopped."""

import signal
import subprocess
import sys
import time

import pytest
from support.wait import PATIENCE_S

PATIENCE = 1.0
PROGRAM = f"""
import asyncio, faulthandler, re, sys, time
from kvmesh.runtime.service import watch_loop

def backtrack():  # holds the interpreter
    re.fullmatch("(a|aa)+b", "a" * 60)

def sleep():
    time.sleep({PATIENCE_S})

async def main():
    faulthandler.enable()
    watch = asyncio.create_task(watch_loop({PATIENCE}))
    await asyncio.sleep(0)
    print("watched", flush=True)
    if sys.argv[1] in globals():
        globals()[sys.argv[1]]()
    await asyncio.to_thread(sys.stdin.readline)
    watch.cancel()
    await asyncio.wait([watch])
    print("whole", flush=True)

asyncio.run(main())
"""


def start(what: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, what]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    return process


@pytest.mark.parametrize("what", ["sleep", "backtrack"])
def test_a_hanging_loop_aborts_its_process_and_prints_the_stack(what: str) -> None:
    _, errors = start(what).communicate(timeout=PATIENCE_S)
    assert "the event loop hangs" in errors
    assert f"in {what}" in errors


def test_a_stopped_process_continues() -> None:
    process = start("nothing")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3 * PATIENCE)  # the tested pause
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate("\n", timeout=PATIENCE_S)
    assert (output, process.returncode) == ("whole\n", 0), errors
