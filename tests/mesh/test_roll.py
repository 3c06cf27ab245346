"""`kvmesh fleet roll` replaces the processes of a running `kvmesh up` under load."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.traffic import Traffic, distinct_prompts
from support.up import Up
from support.wait import eventually

from kvmesh.bus.client import Bus

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLIENTS = 4
ROLL_S = 240.0
ROLLED = {"frontend": 1, "router": 1, "indexer": 1, "worker": 2, "kvbm": 1, "planner": 1}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    up = Up(
        folder,
        *("--kvbm-directory", str(folder), "--kvbm-host-bytes", str(64 << 20)),
        *("--workers", "2", "--max-workers", "2", "--kvbm", "--planner"),
        *("--planner-pools", "workers:min=2,max=2", "--mock-kvbm"),
        # streams last through a roll at little cost
        *("--frontend-access-log", "off", "--mock-speedup", "0.4"),
    )
    up.start()
    yield up
    up.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traffic(up: Up) -> AsyncIterator[Traffic]:
    await up.ready()
    async with Traffic(up.url, distinct_prompts(2, CLIENTS), CLIENTS, 40) as traffic:
        await traffic.wait_for_outputs(CLIENTS)
        yield traffic


async def roll(up: Up, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli.main", "fleet", "roll", *arguments),
        *("--nats", up.nats_url, "--nats-token-file", str(up.token_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def rolled(up: Up, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a whole roll."""
    done = await asyncio.to_thread(up.command, "fleet", "roll", *arguments, timeout=ROLL_S)
    return done.returncode, done.stdout + done.stderr


def _runs(up: Up, service: str, before: dict[str, int]) -> bool:
    return pids(up, service).keys() == before.keys()


def marked(up: Up, service: str) -> list[bool]:
    """For each process of a service, whether it runs in the other installation."""
    environments = (f"/proc/{pid}/environ" for pid in pids(up, service).values())
    return [b"OTHER=1" in Path(file).read_bytes() for file in environments]


def pids(up: Up, service: str) -> dict[str, int]:
    return {name: pid for name, pid in up.children().items() if name.startswith(f"{service}-")}


@pytest.mark.parametrize("service", ROLLED)
async def test_no_request_fails_while_a_service_is_rolled(
    up: Up, traffic: Traffic, service: str
) -> None:
    before = pids(up, service)
    assert len(before) == ROLLED[service]
    status, output = await rolled(up, service, "--watch", "1", "--tolerance", "1000")
    assert status == 0, output + up.output
    after = pids(up, service)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    await traffic.wait_for_outputs(CLIENTS)
    assert traffic.failed == []
    assert f"all {len(before)} of {service} are replaced" in output
    assert " 0 failed" in output
    assert "restarting" not in up.output
    assert "killed" not in up.output


async def test_a_roll_that_was_interrupted_goes_on(up: Up, traffic: Traffic) -> None:
    before = pids(up, "worker")
    process = await roll(up, "worker", "--watch", "60")
    assert process.stdout is not None
    while b"serves again" not in (line := await process.stdout.readline()):
        assert line, up.output
    status, output = await rolled(up, "worker")
    assert status == 1
    assert "rolls worker just now" in output
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130
    status, output = await rolled(up, "worker", "--watch", "1", "--tolerance", "1000")
    assert status == 0, output
    assert "1 of 2 done" in output
    assert output.count("replacing") == 1
    assert not set(pids(up, "worker").values()) & set(before.values())
    assert traffic.failed == []


async def test_a_program_that_does_not_run_stops_the_roll(
    up: Up, traffic: Traffic, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\ncase "$*" in *version) exit 0;; esac\necho broken; exit 2\n')
    broken.chmod(0o755)
    for service in ("frontend", "worker"):
        before = pids(up, service)
        status, output = await rolled(up, service, "--to", str(broken), "--watch", "1")
        assert status == 1
        assert "exited with status 2 before it joined" in output
        assert f"{len(before)} of {len(before)} are not replaced" in output or service == "worker"
        await eventually(partial(_runs, up, service, before))
    status, output = await rolled(up, "router", "--to", "/nonexistent/python")
    assert status == 1
    assert "cannot run /nonexistent/python" in output
    status, output = await rolled(up, "router", "--to", "/elsewhere")
    assert status == 1
    assert "has not ended; --afresh begins another one" in output
    await traffic.wait_for_outputs(CLIENTS)
    assert traffic.failed == []


async def test_another_installation_takes_over(up: Up, traffic: Traffic, tmp_path: Path) -> None:
    environment = tmp_path / "other"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexport OTHER=1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for service in ("frontend", "worker"):
        status, output = await rolled(
            up, service, "--to", str(environment), "--watch", "1", "--afresh", "--tolerance", "1000"
        )
        assert status == 0, output + up.output
        assert all(marked(up, service))
    status, output = await rolled(up, "worker", "--watch", "1", "--tolerance", "1000")
    assert status == 0, output  # back to the own installation
    await traffic.wait_for_outputs(CLIENTS)
    assert traffic.failed == []
    assert not any(marked(up, "worker"))


async def test_a_mesh_without_the_service_says_so(tmp_path: Path) -> None:
    up = Up(tmp_path, "--workers", "1")
    up.start()
    try:
        await up.ready()
        status, output = await rolled(up, "planner")
    finally:
        up.close()
    assert status == 1, output
    assert "no planner runs" in output


async def test_nobody_who_runs_the_process_is_an_error(up: Up, traffic: Traffic) -> None:
    bus = await Bus.connect(up.options, "test")
    os.kill(up.pid, signal.SIGSTOP)
    try:
        status, output = await rolled(up, "indexer")
    finally:
        os.kill(up.pid, signal.SIGCONT)
        await bus.close()
    assert status == 1
    assert "no kvmesh up of this mesh runs indexer-0" in output
