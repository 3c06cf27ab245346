"""`kvmesh up --planner` with prefill and decode workers: they change their roles under load."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import forks
from support.up import Up
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.cli.arguments import moment
from kvmesh.cli.planning.history import read_decisions

pytestmark = pytest.mark.asyncio(loop_scope="module")
REQUESTS, PROMPT = 100, 6144
LONG_S = 90.0
FLAGS = (
    *("--workers", "3", "--prefill-workers", "1", "--planner", "--mock-speedup", "0.3"),
    *("--planner-max-devices", "4", "--planner-ttft", "p90=1s"),
    *("--planner-interval-s", "0.5", "--planner-startup-s", "30"),
    *("--planner-down-cooldown-s", "3"),
)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path, *FLAGS)
    up.start()
    yield up
    up.close()


def prefilling(directory: Directory) -> set[str]:
    return {card.name for card in directory.instances if card.serves == "prefill"}


async def replay(up: Up, folder: Path) -> dict[str, int]:
    """Send distinct long prompts with short answers."""
    rows = [
        {
            "timestamp": 300 * number,
            "input_length": PROMPT,
            "output_length": 3,
            "hash_ids": [PROMPT * number + block for block in range(PROMPT // 512)],
        }
        for number in range(REQUESTS)
    ]
    trace, result = folder / "trace.jsonl", folder / "figures.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("replay", str(trace), "--url", up.url, "--json", str(result))
    options = ("--concurrency", str(REQUESTS))
    done = await asyncio.to_thread(forks.run, (*command, *options), os.environ, LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, int] = json.loads(result.read_bytes())
    return found


async def test_a_running_worker_is_switched_before_any_starts_or_stops(
    up: Up, up_bus: Bus, directory: Directory, tmp_path: Path
) -> None:
    before = {name for name in up.children() if name.startswith("worker")}
    replaying = asyncio.create_task(replay(up, tmp_path))
    await eventually(lambda: len(prefilling(directory)) > 1, LONG_S, "a second one prefills")
    figures = await replaying
    assert figures["succeeded"] == REQUESTS
    assert {name for name in up.children() if name.startswith("worker")} == before
    decisions = [d for d in await read_decisions(up_bus, moment("1h"), None) if d.switches]
    assert decisions
    assert not any("by hand" in d.reason for d in await read_decisions(up_bus, moment("1h"), None))
    assert "Traceback" not in up.output
