"""A supervised mesh whose processes come and go at run time."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from support.up import alive
from support.wait import eventually

from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.mesh import SupervisedMesh
from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.cli.supervisor.restart_policy import RestartPolicy
from kvmesh.cli.supervisor.table import render

PATIENT, STUBBORN = 30.0, 0.2
FAILING = "echo '12:00:00.000 E worker-0  no memory'; exit 1"


def process(name: str, script: str = "exec sleep 600", role: str = "worker") -> ProcessSpec:
    return ProcessSpec(name, role, ("/bin/sh", "-c", script), {"PATH": os.environ["PATH"]})


class Steps:
    """Ready at once."""

    async def after_nats(self) -> None:
        """There is no NATS server to check."""

    async def until_ready(self, mesh: SupervisedMesh) -> None:
        """Nothing to wait for."""

    def serves(self) -> bool:
        return False

    def retired(self, name: str) -> None:
        """Nothing waits for it."""

    async def before_stop(self) -> None:
        """Nothing to close."""


class Run:
    """A running mesh of worker-0 and frontend-0, with its log."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ended: list[str] = []
        log = LogStream(self.lines.append, 10, False, False)
        specs = [process("worker-0"), process("frontend-0", role="frontend")]
        self.mesh = SupervisedMesh(specs, Steps(), log, PATIENT)
        self.task = asyncio.create_task(self.mesh.run())

    def pids(self) -> dict[str, int]:
        return {p.spec.name: p.record.pid for p in self.mesh.processes if p.record.pid}

    def shown(self) -> list[str]:
        table = render(self.mesh.processes, None, {}, asyncio.get_running_loop().time())
        return [row[0].plain for row in table.rows]

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await self.task


@pytest_asyncio.fixture
async def run() -> AsyncIterator[Run]:
    run = Run()
    await eventually(lambda: len(run.pids()) == 2 and run.mesh._ready)
    yield run
    if not run.task.done():
        await run.stop()


async def test_the_table_shows_processes_that_come_and_go(run: Run) -> None:
    run.mesh.add(process("worker-1"))
    assert run.shown() == ["worker-0", "worker-1", "frontend-0"]
    await eventually(lambda: "worker-1" in run.pids())
    pids = run.pids()
    run.mesh.remove("worker-0", PATIENT, run.ended.append)
    run.mesh.remove("worker-9", PATIENT, run.ended.append)  # unknown: it has ended
    await eventually(lambda: sorted(run.ended) == ["worker-0", "worker-9"])
    assert run.shown() == ["worker-1", "frontend-0"]
    assert not alive(pids["worker-0"])
    assert run.pids()["worker-1"] == pids["worker-1"]
    assert not any("restarting" in line for line in run.lines)
    await run.stop()
    assert not any(alive(pid) for pid in pids.values())


async def test_a_process_that_does_not_end_is_killed(run: Run) -> None:
    run.mesh.add(process("worker-1", "trap '' TERM; while :; do sleep 0.1; done"))
    await eventually(lambda: "worker-1" in run.pids())
    pid = run.pids()["worker-1"]
    await eventually(lambda: _ignores_sigterm(pid))
    run.mesh.remove("worker-1", STUBBORN, run.ended.append)
    await eventually(lambda: run.ended == ["worker-1"])
    assert not alive(pid)


def _ignores_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        ignored = next(line.split()[1] for line in file if line.startswith("SigIgn"))
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


async def test_a_shutdown_does_not_wait_for_a_drain(run: Run) -> None:
    run.mesh._stop_timeout_s = STUBBORN
    run.mesh.add(process("worker-1", "trap 'echo told' TERM; while :; do sleep 0.1; done"))
    await eventually(lambda: "worker-1" in run.pids())
    pid = run.pids()["worker-1"]
    run.mesh.remove("worker-1", 600.0, run.ended.append)
    await run.stop()
    assert run.ended == ["worker-1"]
    assert not alive(pid)
    assert len([line for line in run.lines if "told" in line]) <= 1  # one SIGTERM, not two
    run.mesh.add(process("worker-2"))
    assert "worker-2" not in run.shown()


async def test_a_process_that_rejects_its_settings_is_handed_over(run: Run) -> None:
    retired: list[str] = []
    run.mesh.on_retired = retired.append
    run.mesh.add(process("worker-1", "exit 2"))
    await eventually(lambda: retired == ["worker-1"])
    run.mesh.remove("worker-1", PATIENT, run.ended.append)
    await eventually(lambda: run.ended == ["worker-1"])
    assert run.shown() == ["worker-0", "frontend-0"]
    run.mesh.add(process("worker-1"))  # the name is free again
    await eventually(lambda: "worker-1" in run.pids())


async def test_a_process_that_ends_the_start_is_not_started_again() -> None:
    class Waiting(Steps):
        async def until_ready(self, mesh: SupervisedMesh) -> None:
            await asyncio.Event().wait()

    lines: list[str] = []
    specs = [
        process("worker-0", "echo refused; exit 2"),
        # it stops before the worker: meanwhile the worker would be restarted
        process("frontend-0", "trap 'sleep 0.5; exit' TERM; sleep 600 & wait", role="frontend"),
    ]
    log = LogStream(lines.append, 10, False, False)
    with pytest.raises(UpError, match="worker-0 exited with status 2 before the mesh was ready"):
        await SupervisedMesh(specs, Waiting(), log, PATIENT).run()
    assert len([line for line in lines if "refused" in line]) == 1


class Endless(Steps):
    """Never ready."""

    async def until_ready(self, mesh: SupervisedMesh) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("status", "starts"), [(1, 5), (2, 1)])
async def test_no_process_ends_a_mesh_that_serves(status: int, starts: int) -> None:
    class Serving(Endless):
        gone: list[str] = []  # noqa: RUF012

        def serves(self) -> bool:
            return True

        def retired(self, name: str) -> None:
            self.gone.append(name)

    lines: list[str] = []
    log = LogStream(lines.append, 10, False, False)
    steps = Serving()
    specs = [process("worker-0"), process("worker-1", f"exit {status}")]
    mesh = SupervisedMesh(specs, steps, log, PATIENT)
    mesh.processes[1].record.policy = RestartPolicy(max_s=0.1, stable_s=0.0)
    running = asyncio.create_task(mesh.run())
    ends = f"worker-1 exited with status {status}"
    await eventually(lambda: sum(ends in line for line in lines) >= starts)
    assert steps.gone == (["worker-1"] if status == 2 else [])
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await running


async def test_settings_refused_at_once_end_the_start_though_the_mesh_serves() -> None:
    class Serving(Endless):
        def serves(self) -> bool:
            return True

    lines: list[str] = []
    log = LogStream(lines.append, 10, False, False)
    mesh = SupervisedMesh([process("kvbm-0", "exit 2")], Serving(), log, PATIENT)
    with pytest.raises(UpError, match="kvbm-0 exited with status 2 before the mesh was ready"):
        await mesh.run()


async def test_starts_that_fail_end_the_mesh_however_long_each_took() -> None:
    lines: list[str] = []
    log = LogStream(lines.append, 10, False, False)
    mesh = SupervisedMesh([process("worker-0", FAILING)], Endless(), log, PATIENT)
    for supervised in mesh.processes:  # each run counts as a stable one
        supervised.record.policy = RestartPolicy(stable_s=0.0)
    reason = (
        "worker-0 exited with status 1 before the mesh was ready, in each of 3 starts: no memory"
    )
    with pytest.raises(UpError, match=reason):
        await mesh.run()
    assert sum("restarting" in line for line in lines) == 2


async def test_starts_that_fail_again_and_again_are_told_with_the_reason(run: Run) -> None:
    run.mesh.add(process("worker-1", FAILING))
    run.mesh.add(process("dashboard-0", FAILING, role="dashboard"))  # it never joins
    worker, dashboard = run.mesh.processes[1], run.mesh.processes[-1]
    for each in (worker, dashboard):
        each.record.policy = RestartPolicy(first_s=0.01, max_s=0.01)
    end = "worker-1 exited with status 1; restarting"
    told = f"{end}, though 4 starts in a row have failed: no memory"
    await eventually(lambda: any(told in line for line in run.lines))
    await eventually(lambda: dashboard.record.failed_starts >= 4)
    assert not any("dashboard-0 exited" in line and "in a row" in line for line in run.lines)
    assert not any("though 2 starts" in line for line in run.lines)


async def test_a_nats_server_whose_disk_was_full_is_restarted_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    free, spaces = 0, list[Path]()

    def space(path: Path) -> SimpleNamespace:
        spaces.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr("kvmesh.cli.supervisor.mesh.ROOM_S", 0.05)
    monkeypatch.setattr("kvmesh.cli.supervisor.nats.shutil.disk_usage", space)
    started = tmp_path / "started"
    full = "echo 'write x: no space left on device'; echo 'again: no space left on device'"
    script = f"test -e {started} || {{ {full}; }}; touch {started}; exec sleep 600"
    nats = ProcessSpec(
        *("nats", "nats", ("/bin/sh", "-c", script, str(tmp_path / "nats.conf"))),
        {"PATH": os.environ["PATH"]},
    )
    mesh = SupervisedMesh([nats], Steps(), LogStream(lines.append, 10, False, False), PATIENT)
    running = asyncio.create_task(mesh.run())
    record = mesh.processes[0].record
    await eventually(lambda: len(spaces) > 2)
    assert record.starts == 1
    free = 1 << 30
    await eventually(lambda: record.starts == 2)
    assert set(spaces) == {tmp_path}
    seen = len(spaces)
    assert sum("has room: restarting" in line for line in lines) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert len(spaces) == seen
