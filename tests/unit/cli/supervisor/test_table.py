"""The live table of `kvmesh up`."""

import asyncio
import io

import msgspec
from rich.console import Console

from kvmesh.bus.messages import Load
from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.cli.supervisor.process import SupervisedProcess
from kvmesh.cli.supervisor.table import describe, render


def rank(number: int) -> Load:
    return msgspec.convert(
        {
            **dict.fromkeys(Load.__struct_fields__, 0),
            "instance": "worker-0-a",
            "rank": number,
            "running": 2,
            "waiting": 1,
            "active_blocks": 30,
            "total_blocks": 100,
        },
        Load,
    )


def test_the_load_of_all_ranks() -> None:
    assert describe([rank(0), rank(1)]) == ("4", "2", "30%")


async def test_the_table_shows_every_process() -> None:
    process = SupervisedProcess(
        ProcessSpec("worker-0", "worker", ("true",), {}), lambda *_: None, lambda *_: None
    )
    shown = Console(file=io.StringIO(), width=80)
    now = asyncio.get_running_loop().time()
    process.record.started(now - 61, 4711)
    shown.print(render([process], None, {}, now))
    shown.print(render([process], None, {"worker-0": {0: rank(0)}}, now))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    headings = (
        "process",
        "state",
        "pid",
        "up",
        "restarts",
        "running",
        "waiting",
        "KV",
        "in",
        "use",
    )
    row = ("worker-0", "running", "4711", "1m", "0")
    assert text.split() == [*headings, *row, *headings, *row, "2", "1", "30%"]
