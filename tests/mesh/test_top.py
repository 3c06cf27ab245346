"""`kvmesh top` on a live mesh: one frame for scripts, and the screen in a terminal."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.terminal import Terminal
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    mesh = Mesh(nats_server.url, folder, {"KVMESH_MOCK_SPEEDUP": "20"})
    mesh.start_all(workers=1)
    await mesh.ready()
    async with client_session() as session:
        client = Client(mesh.url, session)
        for turn in range(2):
            message = {"role": "user", "content": "Tell the story again. " * 60}
            body = {"model": MODEL, "messages": [message], "max_tokens": 4, "user": f"{turn}"}
            hints = {"session_id": "story\x1b[2J"}
            body["nvext"] = {"agent_hints": {}, "session_control": hints}
            status, answer = await client.post("/v1/chat/completions", body)
            assert status == 200, answer
    yield mesh
    mesh.stop()


async def rows(mesh: Mesh, view: str) -> list[dict[str, Any]]:
    done = await mesh.command("top", "--once", "--json", "--view", view)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["view"] == view
    found: list[dict[str, Any]] = report["rows"]
    return found


async def test_one_frame_for_scripts(mesh: Mesh) -> None:
    fleet = {row["role"]: row for row in await rows(mesh, "fleet")}
    assert set(fleet) == {"frontend", "indexer", "router", "worker"}
    worker = fleet["worker"]
    assert (worker["state"], worker["model"], worker["running"]) == ("ready", MODEL, 0)
    assert worker["kv_cached"] > 0

    async def seen() -> bool:
        return [row["requests"] for row in await rows(mesh, "sessions")] == [2]

    await eventually(seen)
    (session,) = await rows(mesh, "sessions")
    assert session["session"] == "story\x1b[2J"
    assert session["reused"] == session["possible"] > 0.4
    (tenant,) = await rows(mesh, "tenants")
    assert (tenant["tenant"], tenant["requests"], tenant["errors"]) == ("", 2, 0)


async def test_wrong_usage_is_one_line(mesh: Mesh) -> None:
    for arguments, reason in (
        (("--once", "--sort", "runing"), "did you mean running"),
        (("--json",), "--json needs --once"),
        ((), "--once prints one frame"),
    ):
        done = await mesh.command("top", *arguments)
        assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


@contextmanager
def terminal(mesh: Mesh) -> Iterator[Terminal]:
    names = {"KVMESH_NATS_URL": mesh.nats_url, "KVMESH_NATS_NAMESPACE": mesh.namespace}
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    shown = Terminal(["top"], {**environment, **names})
    try:
        yield shown
    finally:
        shown.close()


async def test_keys_in_a_terminal(mesh: Mesh, nats_server: NatsServer) -> None:
    def use(screen: Terminal) -> None:
        screen.shows("fleet 1–4 of 4")
        screen.shows("worker-0-")
        screen.press("2")
        screen.shows("sessions 1–1 of 1")
        screen.shows("story\\x1b[2J")
        screen.press("s")
        screen.shows("waits for▲")
        screen.press("3")
        screen.shows("tenants 1–1 of 1")
        screen.press("p")
        screen.shows("PAUSED")
        screen.press("p?")
        screen.shows("quit")
        nats_server.signal(signal.SIGSTOP)
        try:
            screen.shows("has sent nothing for")
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
        screen.press("?")
        screen.shows("1 fleet  2 sessions")
        screen.press("q")
        assert screen.ended() == 0
        assert "Traceback" not in screen.output

    with terminal(mesh) as screen:
        await asyncio.to_thread(use, screen)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_signal_restores_the_terminal(mesh: Mesh, number: int, status: int) -> None:
    def use(screen: Terminal) -> None:
        screen.shows("fleet 1–4 of 4")
        screen.send_signal(number)
        assert screen.ended() == status
        assert "Traceback" not in screen.output

    with terminal(mesh) as screen:
        await asyncio.to_thread(use, screen)
