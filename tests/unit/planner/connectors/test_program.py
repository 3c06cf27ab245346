"""Programs of connectors: output, failures, deadlines."""

import asyncio
from pathlib import Path

import pytest
from support.up import alive
from support.wait import PATIENCE_S, eventually

from kvmesh.planner.connectors import program
from kvmesh.planner.connectors.interface import ConnectorError
from kvmesh.planner.connectors.program import run_program


async def shell(script: str, timeout_s: float = PATIENCE_S) -> bytes:
    return await run_program(("/bin/sh", "-c", script), timeout_s)


async def test_the_output_is_returned_without_stderr() -> None:
    assert await shell("echo warning >&2; printf out") == b"out"


async def test_arguments_pass_no_shell() -> None:
    assert await run_program(("printf", "%s|", "$HOME; a b", "*"), PATIENCE_S) == b"$HOME; a b|*|"


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("echo no quota >&2; exit 7", "exited with status 7: no quota"),
        ("exit 1", "exited with status 1"),
        ("kill -TERM $$", "was killed by SIGTERM"),
    ],
)
async def test_a_failure_shows_status_and_reason(script: str, end: str) -> None:
    with pytest.raises(ConnectorError) as caught:
        await shell(script)
    assert str(caught.value).endswith(end)
    assert not caught.value.permanent


async def test_only_the_end_of_long_reasons_is_shown() -> None:
    with pytest.raises(ConnectorError) as caught:
        await shell("head -c 100000 /dev/zero | tr '\\0' x >&2; echo ' the end' >&2; exit 1")
    assert str(caught.value).endswith("the end")
    assert len(str(caught.value)) < 1000


async def test_a_missing_program_is_permanent() -> None:
    with pytest.raises(ConnectorError, match="cannot run /nowhere/x: No such file") as caught:
        await run_program(("/nowhere/x",), 1.0)
    assert caught.value.permanent


async def test_a_program_beyond_its_deadline_dies_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"echo stuck >&2; sleep 600 & echo $! > {file}; wait"
    with pytest.raises(ConnectorError, match=r"did not end within 1 s: stuck"):
        await shell(script, 1.0)
    await eventually(lambda: not alive(int(file.read_text())))


async def test_a_cancelled_call_kills_its_program(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    call = asyncio.create_task(shell(f"echo $$ > {file}; sleep 600"))
    await eventually(lambda: file.exists() and file.read_text().strip() != "")
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    assert not alive(int(file.read_text()))


@pytest.mark.parametrize("steps", range(12))
async def test_a_call_can_be_cancelled_while_its_program_starts(steps: int) -> None:
    call = asyncio.create_task(shell("sleep 600"))
    for _ in range(steps):
        await asyncio.sleep(0)
    call.cancel()
    done, _ = await asyncio.wait({call}, timeout=PATIENCE_S)
    assert done == {call}
    assert call.cancelled()
    running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert running == []


async def test_a_background_process_with_the_pipes_open_delays_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pid"
    assert await shell(f"echo started; sleep 600 & echo $! > {file}") == b"started\n"
    pid = int(file.read_text())
    assert alive(pid)  # it may be a worker
    await shell(f"kill {pid}")


async def test_too_much_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "OUTPUT_BYTES", 1000)
    with pytest.raises(ConnectorError, match="printed more than 1000 bytes"):
        await shell("head -c 1000000 /dev/zero")
