"""Replay against a small server: lengths, sharing, order, bounds, failures, interruption."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.chat_server import ChatServer
from support.wait import eventually

Rows = list[dict[str, Any]]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with ChatServer() as server:
        yield server


def rows(count: int, **more: Any) -> Rows:
    """Prompts of 1200 tokens that share their first 1024."""
    return [
        {
            "timestamp": i,
            "input_length": 1200,
            "output_length": 6,
            "hash_ids": [0, 1, 10 + i],
            **more,
        }
        for i in range(count)
    ]


async def start(
    tmp_path: Path, url: str, trace: Rows | str, *options: str, name: str = "trace.jsonl"
) -> asyncio.subprocess.Process:
    file = tmp_path / name
    text = trace if isinstance(trace, str) else "\n".join(json.dumps(row) for row in trace)
    file.write_text(text + "\n")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvmesh.cli.main", "replay", str(file), "--url", url),
        *("--json", str(tmp_path / "figures.json"), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """Restore SIGINT, which shells make background processes and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def replay(
    tmp_path: Path, url: str, trace: Rows | str, *options: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and figures of one run."""
    process = await start(tmp_path, url, trace, *options)
    out, err = await process.communicate()
    figures = tmp_path / "figures.json"
    content = json.loads(figures.read_text()) if figures.exists() else {}
    return process.returncode or 0, (out + err).decode(), content


async def test_every_request_is_sent_with_its_lengths(tmp_path: Path, server: ChatServer) -> None:
    status, out, figures = await replay(tmp_path, server.url, rows(20))
    assert status == 0, out
    assert (figures["requests"], figures["failed"]) == (20, 0)
    assert figures["prompt_tokens"] == 20 * 1200
    assert figures["length_ratio"] == 1.0
    assert figures["output_tokens"] == 20 * 6
    assert "cached tokens" in out
    assert "TTFT" in out


async def test_prompts_share_what_the_trace_shares(tmp_path: Path, server: ChatServer) -> None:
    _, _, figures = await replay(tmp_path, server.url, rows(10), "--concurrency", "1")
    assert figures["cached_tokens"] == 9 * 1024


async def test_prompts_fit_another_tokenizer(tmp_path: Path) -> None:
    async with ChatServer(overhead=30, tokens_per_word=2) as server:
        _, _, figures = await replay(tmp_path, server.url, rows(10), "--concurrency", "1")
    assert figures["length_ratio"] == pytest.approx(1, abs=0.01)
    assert figures["cached_tokens"] == pytest.approx(9 * 1024, abs=9 * 32)


async def test_another_seed_shares_nothing(tmp_path: Path, server: ChatServer) -> None:
    await replay(tmp_path, server.url, rows(1))
    _, _, figures = await replay(tmp_path, server.url, rows(1), "--seed", "1")
    assert figures["cached_tokens"] == 0


async def test_limit_and_model(tmp_path: Path, server: ChatServer) -> None:
    await replay(tmp_path, server.url, rows(9), "--limit", "4", "--model", "other")
    assert [body["model"] for body in server.requests] == ["other"] * 4


async def test_concurrency_bounds_what_is_in_flight(tmp_path: Path, server: ChatServer) -> None:
    server.hold.clear()
    process = await start(tmp_path, server.url, rows(8), "--concurrency", "3")
    await eventually(lambda: server.in_flight == 3)
    server.hold.set()
    assert await process.wait() == 0
    assert server.most_in_flight == 3
    assert len(server.requests) == 8


async def test_a_turn_waits_for_the_one_before(tmp_path: Path, server: ChatServer) -> None:
    trace = rows(1, session_id="s") + rows(1, session_id="s", delay=1.0)
    server.hold.clear()
    process = await start(tmp_path, server.url, trace)
    await eventually(lambda: server.in_flight == 1)
    server.hold.set()
    assert await process.wait() == 0
    assert server.most_in_flight == 1
    assert [headers["x-kvmesh-session-id"] for headers in server.headers] == ["s", "s"]


async def test_the_final_request_of_a_session_is_marked(tmp_path: Path, server: ChatServer) -> None:
    turns: Rows = [
        {"session": 0, "branch": 0, "output_branch": 0, "input_tokens": tokens, "output_tokens": 1}
        for tokens in (100, 200)
    ]
    turns[1] |= {"after": [0]}
    trace = {
        "format": "kvmesh.workload.v1",
        "block_size": 1,
        "branches": [[-1, 0]],
        "sessions": [{"name": "s", "ends": True}],
        "rounds": turns,
    }
    process = await start(tmp_path, server.url, json.dumps(trace), name="trace.json")
    assert await process.wait() == 0
    ends = [headers.get("x-kvmesh-session-final") for headers in server.headers]
    assert ends == [None, "true"]


async def test_a_lone_request_has_no_session(tmp_path: Path, server: ChatServer) -> None:
    family = rows(1, session_id="mother")
    family += rows(1, session_id="child", parent_session_id="mother")
    await replay(tmp_path, server.url, rows(1) + family, "--concurrency", "1")
    names = [headers.get("x-kvmesh-session-id") for headers in server.headers]
    assert names == [None, "mother", "child"]
    assert server.headers[-1].get("x-kvmesh-parent-session-id") == "mother"


async def test_failures_are_reported_with_reasons(tmp_path: Path, server: ChatServer) -> None:
    server.fail = {1: 503, 2: 503, 3: 429}
    server.cut = {4}
    status, out, figures = await replay(tmp_path, server.url, rows(8))
    assert status == 1
    assert figures["failed"] == 4
    assert sorted(figures["errors"].values()) == [1, 1, 2]
    assert "503 refused …" in out
    assert "the stream ended without a finish reason" in out


async def test_interrupting_shows_what_was_measured(tmp_path: Path, server: ChatServer) -> None:
    trace = rows(3) + rows(1, session_id="late") + rows(1, session_id="late", delay=3_600_000)
    process = await start(tmp_path, server.url, trace, "--repair")
    await eventually(lambda: len(server.requests) == 4 and server.in_flight == 0)
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode == 1
    ended = re.search(rb"requests +(\d) \(0 failed", out)
    unfinished = re.search(rb"unfinished +(\d)", out)
    assert ended, out
    assert unfinished, out
    assert int(ended[1]) + int(unfinished[1]) == 5


async def test_an_invalid_trace_is_rejected_before_sending(
    tmp_path: Path, server: ChatServer
) -> None:
    status, out, _ = await replay(tmp_path, server.url, json.dumps(rows(1)[0]) + "\nnonsense")
    assert status == 2
    assert "trace.jsonl:2: " in out
    assert server.requests == []


async def test_no_server_is_one_clear_line(tmp_path: Path) -> None:
    status, out, _ = await replay(tmp_path, "http://127.0.0.1:9", rows(1))
    assert status == 2
    assert out.startswith("kvmesh replay: cannot reach http://127.0.0.1:9")
    assert len(out.splitlines()) == 1
