"""A supervised mesh whose processes are replaced at run time."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.up import alive
from support.wait import eventually

from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.mesh import OWN_PROGRAM, SupervisedMesh
from kvmesh.cli.supervisor.plan import ProcessSpec

PATIENT = 30.0
SLEEPS = "exec sleep 600"


class Ready:
    """Steps of a mesh that is ready at once."""

    async def after_nats(self) -> None:
        """There is no NATS server to check."""

    async def until_ready(self, mesh: SupervisedMesh) -> None:
        """Nothing to wait for."""

    def serves(self) -> bool:
        return True

    def retired(self, name: str) -> None:
        """Nobody waits for it."""

    async def before_stop(self) -> None:
        """Nothing to close."""


class Running:
    """A running mesh of worker-0 and frontend-0; `script` is a program that replaces a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.retired: list[str] = []
        specs = [
            ProcessSpec(f"{role}-0", role, ("/bin/sh", "-c", SLEEPS), {"PATH": os.environ["PATH"]})
            for role in ("worker", "frontend")
        ]
        log = LogStream(self.lines.append, 10, False, False)
        self.mesh = SupervisedMesh(specs, Ready(), log, PATIENT)
        self.mesh.on_retired = self.retired.append
        self.task = asyncio.create_task(self.mesh.run())

    def program(self, text: str) -> str:
        """A program that takes the place of the shell."""
        file = self.folder / "program"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return str(file)

    def pids(self, name: str) -> list[int]:
        found = [p.record.pid for p in self.mesh.processes if p.spec.name == name]
        return [pid for pid in found if pid is not None]

    async def joined(self, name: str, before: list[int]) -> None:
        """Wait for another process of that name: it joins at once."""
        while not set(self.pids(name)) - set(before):
            await asyncio.sleep(0.01)

    async def replace(self, name: str, program: str = OWN_PROGRAM) -> None:
        await self.mesh.replace(name, program, PATIENT, self.joined(name, self.pids(name)))

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await self.task


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    running = Running(tmp_path)
    await eventually(lambda: all(running.pids(name) for name in ("worker-0", "frontend-0")))
    yield running
    if not running.task.done():
        await running.stop()


@pytest.mark.parametrize("name", ["worker-0", "frontend-0"])
async def test_another_process_takes_the_place(running: Running, name: str) -> None:
    (old,) = running.pids(name)
    await running.replace(name)
    (new,) = running.pids(name)
    assert new != old
    assert not alive(old)
    assert [p.spec.name for p in running.mesh.processes] == ["worker-0", "frontend-0"]
    assert not any("restarting" in line for line in running.lines)


async def test_the_successor_of_a_frontend_joins_first(running: Running) -> None:
    (old,) = running.pids("frontend-0")
    may_join = asyncio.Event()

    async def joined() -> None:
        await may_join.wait()

    work = asyncio.create_task(running.mesh.replace("frontend-0", "", PATIENT, joined()))
    await eventually(lambda: len(running.pids("frontend-0")) == 2)
    assert alive(old)
    may_join.set()
    await work
    assert old not in running.pids("frontend-0")


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("name", ["worker-0", "frontend-0"])
async def test_a_program_that_does_not_start_is_put_back(running: Running, name: str) -> None:
    before = running.pids(name)
    program = running.program("echo refused; exit 2")
    with pytest.raises(UpError, match=rf"{name} exited with status 2 before it joined"):
        await running.mesh.replace(name, program, PATIENT, never())
    await eventually(lambda: len(running.pids(name)) == 1)
    assert (running.pids(name) == before) == name.startswith("frontend")
    assert running.retired == []
    assert all(p.spec.argv[0] == "/bin/sh" for p in running.mesh.processes)


async def test_a_program_stays_until_another_one_comes(running: Running) -> None:
    program = running.program(SLEEPS)
    await running.replace("worker-0", program)
    assert running.mesh.processes[0].spec.argv[0] == program
    await running.replace("worker-0")
    assert running.mesh.processes[0].spec.argv[0] == "/bin/sh"


async def test_a_stop_ends_a_replacement(running: Running) -> None:
    work = asyncio.create_task(running.mesh.replace("worker-0", "", PATIENT, never()))
    await eventually(lambda: bool(running.mesh._trials))
    await running.stop()
    with pytest.raises(UpError, match="worker-0 was stopped before it joined"):
        await work


async def test_a_frontend_is_told_to_hurry_before_it_is_killed(tmp_path: Path) -> None:
    script = "trap 'echo told' TERM; echo trapped; while :; do sleep 0.05; done"
    lines: list[str] = []
    spec = ProcessSpec(
        "frontend-0", "frontend", ("/bin/sh", "-c", script), {"PATH": os.environ["PATH"]}
    )
    mesh = SupervisedMesh([spec], Ready(), LogStream(lines.append, 10, False, False), 2.0)
    task = asyncio.create_task(mesh.run())
    await eventually(lambda: mesh._ready and any("trapped" in line for line in lines))
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert len([line for line in lines if "told" in line]) == 2
