"""The process that simulates: it is killed at the end of the budget, and replaced after a death."""

import os
import signal
from pathlib import Path

import pytest
from support.ended_requests import distinct, question

from kvmesh.oracle import process
from kvmesh.oracle.process import SimulationProcess
from kvmesh.settings.schema import RouterSettings


def children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


async def test_it_is_killed_beyond_its_budget_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(children())
    simulating = SimulationProcess(RouterSettings())
    monkeypatch.setattr(process, "GRACE_S", 0.0)
    late = await simulating.answer(question([[1]], 1.0, budget_s=1e-3), distinct(60, 1.0))
    assert "killed after 0.001 s" in late.error
    assert set(children()) <= before
    monkeypatch.setattr(process, "GRACE_S", 60.0)
    asking = question([[2]], 1.0)
    assert (await simulating.answer(asking, distinct(60, 1.0))).requests == 60
    [child] = set(children()) - before
    os.kill(child, signal.SIGKILL)
    assert "the simulating process failed" in (await simulating.answer(asking, [])).error
    again = await simulating.answer(asking, distinct(10, 1.0))
    assert "10 requests of m have ended in this window" in again.error
    await simulating.close()
    assert set(children()) <= before
