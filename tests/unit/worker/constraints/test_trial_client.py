"""Constraints tried in forks of a child process, including forks that crash or hang."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.trials import is_running
from support.wait import eventually

from kvmesh.bus.messages import Guided
from kvmesh.worker.constraints.trial_client import TrialClient
from kvmesh.worker.engine import EngineError, Rejected

SERVER = """
import os, signal, sys, time
from pathlib import Path
from kvmesh.worker.constraints.trial_server import TrialServer

def make(guided):
    what, _, rest = guided.value.partition(" ")
    match what:
        case "refuse": raise KeyError(rest)
        case "die": os.kill(os.getpid(), signal.SIGSEGV)
        case "leave": os._exit(3)
        case "hold": return bytearray(int(rest))
        case "turn":
            Path(rest).write_text(str(os.getpid()))
            while True: pass
        case "print": print("x" * 100_000)
    return guided.value

folder = Path(sys.argv[1]).parent
Path(sys.argv[1]).write_text(str(os.getpid()))
while (folder / "slow").exists():
    time.sleep(0.01)
TrialServer(make, float(sys.argv[2])).run()
"""


class Stage:
    """Trials in `folder`, where the process writes its id."""

    def __init__(self, folder: Path, seconds: float = 60.0, most_s: float = 60.0) -> None:
        self.folder = folder
        self.trials = TrialClient(
            most_s, sys.executable, "-c", SERVER, str(folder / "pid"), str(seconds)
        )

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    async def try_regex(self, value: str) -> int:
        return await self.trials.try_constraint(Guided(kind="regex", value=value))

    async def endless_trial(self) -> tuple["asyncio.Task[int]", int]:
        """An endless trial, and its process."""
        file = self.folder / "turning"
        file.unlink(missing_ok=True)
        task = asyncio.create_task(self.try_regex(f"turn {file}"))
        await eventually(lambda: file.exists() and file.read_text())
        return task, int(file.read_text())


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.trials.close()


async def test_a_verdict_has_a_size_or_a_reason(stage: Stage) -> None:
    assert 0 < await stage.try_regex("fine") < 16 << 20
    assert await stage.try_regex(f"hold {64 << 20}") > 32 << 20
    with pytest.raises(Rejected, match="no such thing"):
        await stage.try_regex("refuse no such thing")


@pytest.mark.parametrize("value", ["die", "leave", f"hold {3 << 30}"])
async def test_an_expensive_constraint_ends_only_its_fork(stage: Stage, value: str) -> None:
    await stage.try_regex("fine")
    pid = stage.pid
    with pytest.raises(Rejected, match="too much time, memory or stack"):
        await stage.try_regex(value)
    assert await stage.try_regex("fine")
    assert stage.pid == pid


async def test_cpu_time_is_bounded(tmp_path: Path) -> None:
    stage = Stage(tmp_path, seconds=0.1)
    with pytest.raises(Rejected, match="too much time"):
        await stage.try_regex(f"turn {tmp_path / 'turning'}")
    stage.trials.close()


async def test_time_is_bounded_once_the_trial_has_begun(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    stage = Stage(tmp_path, most_s=0.5)
    task = asyncio.create_task(stage.try_regex(f"turn {tmp_path / 'turning'}"))
    await eventually(lambda: (tmp_path / "pid").exists() and stage.pid)
    await asyncio.wait([task], timeout=0.6)
    assert not task.done()
    (tmp_path / "slow").unlink()
    with pytest.raises(Rejected, match=r"the regex takes more than 0\.5 s to compile"):
        await task
    stage.trials.close()


async def test_a_process_that_does_not_get_ready_is_replaced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.worker.constraints.trial_client.START_TIMEOUT_S", 0.5)
    (stage.folder / "slow").touch()
    with pytest.raises(EngineError, match=r"did not start within 0\.5 s"):
        await stage.try_regex("fine")
    monkeypatch.undo()
    (stage.folder / "slow").unlink()
    assert await stage.try_regex("fine")


async def test_a_cancelled_trial_is_stopped_and_others_continue(stage: Stage) -> None:
    task, pid = await stage.endless_trial()
    assert await stage.try_regex("fine")
    task.cancel()
    await eventually(lambda: not is_running(pid))
    assert await stage.try_regex("fine")


async def test_output_of_a_fork_is_not_taken_for_a_verdict(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await stage.try_regex("print")
    assert "x" not in "".join(capfd.readouterr())


async def test_a_process_that_ends_is_replaced_and_its_trials_repeated(
    stage: Stage,
) -> None:
    task, fork = await stage.endless_trial()
    first = stage.pid
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: (stage.folder / "turning").read_text() not in ("", str(fork)))
    assert stage.pid != first
    os.kill(fork, signal.SIGKILL)
    assert await stage.try_regex("fine")
    os.kill(stage.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="has ended"):
        await asyncio.gather(task)


async def test_a_frozen_process_is_replaced_with_all_its_forks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmesh.worker.constraints.trial_client.BEGIN_TIMEOUT_S", 2.0)
    task, fork = await stage.endless_trial()
    first = stage.pid
    os.kill(first, signal.SIGSTOP)
    assert await stage.try_regex("fine")
    assert stage.pid != first
    await eventually(lambda: not is_running(first) and not is_running(fork))
    assert "was silent for 2 s; starting another and trying again" in caplog.text
    task.cancel()


async def test_a_frozen_process_does_not_outlive_its_worker(stage: Stage) -> None:
    await stage.try_regex("fine")
    os.kill(stage.pid, signal.SIGSTOP)
    stage.trials.close()
    await eventually(lambda: not is_running(stage.pid))
    with pytest.raises(EngineError, match="the worker is stopping"):
        await stage.try_regex("fine")


async def test_a_cancelled_caller_does_not_stop_the_start(stage: Stage) -> None:
    slow = stage.folder / "slow"
    slow.touch()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await stage.try_regex("fine")
    await eventually(lambda: (stage.folder / "pid").exists() and stage.pid)
    pid = stage.pid
    slow.unlink()
    assert await stage.try_regex("fine")
    assert stage.pid == pid


async def test_a_process_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    trials = TrialClient(60.0, sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(EngineError, match="has ended"):
        await trials.try_constraint(Guided(kind="regex", value="fine"))


async def test_its_end_is_that_of_its_trials(stage: Stage) -> None:
    task, pid = await stage.endless_trial()
    server = stage.pid
    stage.trials.close()
    await eventually(lambda: not is_running(pid) and not is_running(server))
    with pytest.raises(EngineError):
        await asyncio.gather(task)
