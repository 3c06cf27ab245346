"""Guarded processes die with their worker; stopped processes are detected."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TypeAlias

import psutil
import pytest
from support.wait import PATIENCE_S, eventually

from kvmesh.worker.engines.vllm.process_guard import ProcessGuard, process_trees
from kvmesh.worker.engines.vllm.stopped_processes import any_stopped

SPAWNED = """
    child = subprocess.Popen(["sh", "-c", "sleep 1000 & echo; wait"], stdout=subprocess.PIPE)
    child.stdout.read(1)
    roots.append(child.pid)
"""
FORKED = """
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=subprocess.run, args=(["sleep", "1000"],))
    child.start()
    roots.append(child.pid)
"""
PARENT = """
import asyncio, multiprocessing, subprocess
from kvmesh.worker.engines.vllm.process_guard import ProcessGuard
async def main():
    roots = []
    guard = ProcessGuard(lambda: roots)
    await asyncio.sleep(0)
    %s
    while len(guard._pids) < 2:
        await asyncio.sleep(0.01)
    print("guarded", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
Child: TypeAlias = "subprocess.Popen[bytes]"


@pytest.fixture
def child() -> Iterator[Child]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child
        child.kill()


@pytest.mark.parametrize("begin", [SPAWNED, FORKED], ids=["spawned", "forked"])
def test_guarded_processes_and_their_children_die_with_a_killed_process(begin: str) -> None:
    program = [sys.executable, "-W", "ignore", "-c", PARENT % begin.strip()]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"guarded\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert psutil.wait_procs(children, PATIENCE_S)[1] == []


async def test_a_closed_guard_kills_nothing(child: Child) -> None:
    guard = ProcessGuard(lambda: [child.pid])
    await eventually(lambda: guard._pids == [child.pid])
    await guard.close()
    assert child.poll() is None


async def test_processes_that_have_ended_are_guarded_no_more(child: Child) -> None:
    guard = ProcessGuard(lambda: [child.pid])
    await eventually(lambda: guard._pids == [child.pid])
    child.kill()
    child.wait(PATIENCE_S)
    await eventually(lambda: guard._pids == [])
    assert process_trees([child.pid]) == []
    await guard.close()


async def test_processes_are_guarded_where_none_can_be_listed(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "children", refuse)
    assert process_trees([child.pid]) == [child.pid]


async def test_a_process_that_is_forgotten_meanwhile_ends_no_guard(child: Child) -> None:
    forgotten = [child.pid]

    def roots() -> list[int]:
        if forgotten:
            forgotten.clear()
            raise ValueError("process object is closed")
        return [child.pid]

    guard = ProcessGuard(roots)
    await eventually(lambda: guard._pids == [child.pid])
    await guard.close()


async def test_a_guard_that_was_killed_is_told_of(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    pids: list[int] = []
    guard = ProcessGuard(lambda: pids)
    guard._watcher.kill()
    guard._watcher.wait(PATIENCE_S)
    pids.append(child.pid)
    await eventually(lambda: "will outlive a killed worker" in caplog.text)
    await guard.close()


async def test_a_stopped_guard_can_be_closed(child: Child) -> None:
    guard = ProcessGuard(lambda: [child.pid])
    shell = psutil.Process(guard._watcher.pid)
    shell.suspend()
    await guard.close()
    assert not shell.is_running()
    assert child.poll() is None


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
