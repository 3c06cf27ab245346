"""Supervised processes: start, output, end."""

import asyncio

from support.up import alive
from support.wait import eventually

from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.cli.supervisor.process import SupervisedProcess


async def test_a_program_that_does_not_exist_is_reported_and_retried() -> None:
    lines: list[str] = []
    ends: list[int] = []
    spec = ProcessSpec("worker-0", "worker", ("/nowhere/program",), {})
    process = SupervisedProcess(
        spec, lambda _, line: lines.append(line), lambda _, end: ends.append(end)
    )
    running = asyncio.create_task(process.run())
    await eventually(lambda: len(ends) >= 2)
    await process.stop(1.0)
    await running
    assert ends[:2] == [127, 127]
    assert lines[0] == "cannot start /nowhere/program: No such file or directory"


async def test_children_of_a_process_die_with_it() -> None:
    lines: list[str] = []
    script = "sleep 600 & echo $!; exit 3"
    spec = ProcessSpec("worker-0", "worker", ("/bin/sh", "-c", script), {})
    ends: list[int] = []
    process = SupervisedProcess(
        spec, lambda _, line: lines.append(line), lambda _, end: ends.append(end)
    )
    running = asyncio.create_task(process.run())
    await eventually(lambda: ends)
    await process.stop(1.0)
    await running
    assert ends[0] == 3
    await eventually(lambda: not any(alive(int(pid)) for pid in lines))


async def test_output_is_split_into_lines_of_bounded_length() -> None:
    lines: list[str] = []
    long = "head -c 200000 /dev/zero | tr '\\0' x"
    script = f"printf 'one\\ntwo'; printf ' more\\n'; {long}; exec sleep 600"
    spec = ProcessSpec("worker-0", "worker", ("/bin/sh", "-c", script), {})
    process = SupervisedProcess(spec, lambda _, line: lines.append(line), lambda *_: None)
    running = asyncio.create_task(process.run())
    await eventually(lambda: sum(map(len, lines)) > 100_000)
    await process.stop(1.0)
    await running
    assert lines[:2] == ["one", "two more"]
    assert set("".join(lines[2:])) == {"x"}
    assert sum(map(len, lines[2:])) == 200_000
    assert process.record.pid is None


async def test_a_line_that_overwrites_itself_is_passed_on_as_it_is_shown() -> None:
    lines: list[str] = []
    script = r"printf 'one\r\n'; printf '\r 10%%'; printf '\r 20%%\r'; printf ' 30%%\r 40%%\ntwo\n'"
    spec = ProcessSpec("worker-0", "worker", ("/bin/sh", "-c", f"{script}; exec sleep 600"), {})
    process = SupervisedProcess(spec, lambda _, line: lines.append(line), lambda *_: None)
    running = asyncio.create_task(process.run())
    await eventually(lambda: "two" in lines)
    await process.stop(1.0)
    await running
    assert (lines[0], lines[-2:]) == ("one", [" 40%", "two"])
    assert len(lines) <= 4  # at most one state of the bar before the last one
