"""`kvmesh up --planner` under real load: the fleet grows, shrinks, and sleeps at zero."""

import asyncio
import http.client
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.nats import free_port
from support.up import Up
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.cli.arguments import moment
from kvmesh.cli.planning.history import read_decisions

pytestmark = pytest.mark.asyncio(loop_scope="module")
REQUESTS = 120
PROMPT, OUTPUT = 2048, 6
LONG_S = 180.0  # for what takes a loaded machine tens of seconds
QUICK = (
    *("--planner-interval-s", "0.5", "--planner-startup-s", "3"),
    *("--planner-down-cooldown-s", "4", "--planner-manual-hold-s", "0"),
)


@pytest.fixture
def port() -> int:
    """The port of the planner's metrics."""
    return free_port()


@pytest.fixture
def up(tmp_path: Path, port: int, request: pytest.FixtureRequest) -> Iterator[Up]:
    flags = ("--planner-metrics-port", str(port), *QUICK, *request.param)
    up = Up(tmp_path, "--workers", "1", "--planner", *flags)
    up.start()
    yield up
    up.close()


def workers(up: Up) -> set[str]:
    return {name for name in up.children() if name.startswith("worker")}


def listed(up: Up) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=60)
    connection.request("GET", "/v1/models")
    with connection.getresponse() as response:
        names = [entry["id"] for entry in json.loads(response.read())["data"]]
    connection.close()
    return names


SLOW = ("--max-workers", "4", "--mock-speedup", "0.1", "--planner-ttft", "p90=2s")


async def replay(up: Up, folder: Path) -> dict[str, Any]:
    """Send distinct prompts, more than one worker can compute in the meantime."""
    rows = [
        {
            "timestamp": 250 * number,
            "input_length": PROMPT,
            "output_length": OUTPUT,
            "hash_ids": [PROMPT * number + block for block in range(PROMPT // 512)],
        }
        for number in range(REQUESTS)
    ]
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("replay", str(trace), "--url", up.url, "--json", str(folder / "figures.json"))
    options = ("--concurrency", str(REQUESTS))
    done = await asyncio.to_thread(forks.run, (*command, *options), os.environ, LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


@pytest.mark.parametrize("up", [SLOW], indirect=True)
async def test_the_fleet_grows_under_a_burst_and_shrinks_after_it(
    up: Up, up_bus: Bus, tmp_path: Path
) -> None:
    replaying = asyncio.create_task(replay(up, tmp_path))
    await eventually(lambda: len(workers(up)) > 1, LONG_S, "more workers run")
    figures = await replaying
    assert figures["succeeded"] == REQUESTS
    assert figures["output_tokens"] == REQUESTS * OUTPUT
    await eventually(lambda: len(workers(up)) == 1, LONG_S, "one worker runs")
    assert await asyncio.to_thread(up.serves)
    assert "Traceback" not in up.output
    decisions = [d for d in await read_decisions(up_bus, moment("1h"), None) if d.changed]
    sizes = [decision.pools["workers"] for decision in decisions]
    assert any(size.wanted > size.before for size in sizes)
    assert any(size.wanted < size.before for size in sizes)
    assert max(size.wanted for size in sizes) <= 4


ZERO = (
    *("--mock-speedup", "20", "--planner-zero-after-s", "5"),
    *("--planner-pools", "workers:min=0,max=2"),
)


def decided(port: int) -> float:
    """The number of the planner's decisions."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^kvmesh_planner_decisions_total{.*} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("up", [ZERO], indirect=True)
async def test_the_last_worker_leaves_and_a_request_wakes_one(
    up: Up, up_bus: Bus, port: int
) -> None:
    for _ in range(3):
        assert await asyncio.to_thread(up.serves)
    for _ in range(2):
        await eventually(lambda: not workers(up), LONG_S, "no worker runs")
        assert await asyncio.to_thread(listed, up) == ["kvmesh-demo"]
        # requests of the window wake nobody
        target = await asyncio.to_thread(decided, port) + 6
        await eventually(lambda n=target: decided(port) >= n)  # type: ignore[misc]
        assert not workers(up)
        assert (await asyncio.to_thread(up.complete))[-1] == "[DONE]"
        assert workers(up)
    changed = [d for d in await read_decisions(up_bus, moment("1h"), None) if d.changed]
    steps = [(d.pools["workers"].before, d.pools["workers"].wanted) for d in changed]
    assert steps[:4] == [(1, 0), (0, 1), (1, 0), (0, 1)]
    assert "Traceback" not in up.output
