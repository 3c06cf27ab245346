"""`kvmesh replay` against a whole mesh: all requests succeed, lengths and sharing are retained."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support import forks
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Round, Workload

pytestmark = pytest.mark.asyncio(loop_scope="module")
REPLAY_S = 240.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), {"KVMESH_MOCK_SPEEDUP": "1000"})
    try:
        mesh.start_all(2)
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


async def replay(
    mesh: Mesh, folder: Path, rows: list[dict[str, Any]], *more: str
) -> dict[str, Any]:
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = ("--json", str(folder / "figures.json"))
    command = ("replay", str(trace), "--url", mesh.url, *written, *more)
    done = await asyncio.to_thread(forks.run, command, os.environ, REPLAY_S)
    assert done.returncode == 0, done.stdout + done.stderr + mesh.logs()[-4000:]
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


async def test_lengths_are_those_of_the_trace(mesh: Mesh, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "timestamp": i,
            "input_length": 700 + i,
            "output_length": 9,
            "hash_ids": [2 * i, 2 * i + 1],
        }
        for i in range(40)
    ]
    figures = await replay(mesh, tmp_path, rows)
    assert figures["succeeded"] == 40
    assert figures["prompt_tokens"] == sum(row["input_length"] for row in rows)
    assert figures["output_tokens"] == 40 * 9
    assert figures["ttft_s"]["p50"] > 0


async def test_turns_of_a_session_find_their_prefix_cached(mesh: Mesh, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "input_length": 512 * (turn + 4),
            "output_length": 5,
            "hash_ids": [1000 * session + block for block in range(turn + 4)],
            "session_id": f"s{session}",
            **({"delay": 20} if turn else {"timestamp": 0}),
        }
        for turn in range(6)
        for session in range(4)
    ]
    figures = await replay(mesh, tmp_path, rows, "--seed", "7")
    asked = sum(row["input_length"] for row in rows)
    repeated = sum(row["input_length"] - 512 for row in rows if "delay" in row)
    assert figures["prompt_tokens"] == asked
    assert figures["cached_tokens"] >= 0.5 * repeated


async def test_a_capture_equals_the_sent_requests(mesh: Mesh, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "input_length": 300 + 16 * turn,
            "output_length": 7,
            "hash_ids": [session],
            "session_id": f"captured-{session}",
            **({"delay": 30} if turn else {"timestamp": 0}),
        }
        for turn in range(4)
        for session in range(3)
    ]
    await replay(mesh, tmp_path, rows, "--seed", "8")
    out = tmp_path / "capture.json"

    async def captured() -> tuple[Workload, list[Round]]:
        """The records of these sessions, once complete."""
        done = await mesh.command("workload", "capture", "-o", str(out), "--since", "10m")
        assert done.returncode == 0, done.stderr
        workload, _ = load(str(out))
        sessions = [s.name for s in workload.sessions]
        found = [r for r in workload.rounds if sessions[r.session].startswith("captured-")]
        assert sorted(r.input_tokens for r in found) == sorted(r["input_length"] for r in rows)
        return workload, found

    workload, found = await eventually(captured)
    assert {r.output_tokens for r in found} == {7}
    followers = [r for r in found if r.after]
    assert len(followers) == 9
    assert all(0.02 < r.at_s < 5 for r in followers)
    assert workload.block_size == 16
