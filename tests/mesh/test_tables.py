"""The tables of all commands about a live mesh, in terminals of several widths and in a pipe."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from support import forks
from support.frontend import MODEL, Client, client_session
from support.terminal import Terminal
from support.up import Up
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "llama-3-70b-instruct-gpu-node-17-rack-b-worker-0"
WIDTHS = (80, 100, 160)
COMMANDS = (
    "status --starts",
    *(f"top --once --view {view}" for view in ("fleet", "sessions", "tenants", "caches")),
    "explain REQUEST",
    "explain --slow",
    "explain --session agent-of-the-billing-service-7",
    "explain trace agent-of-the-billing-service-7",
    "usage --by tenant,key,model,session",
    "plan learned",
    "plan learned returns",
    "config streams list",
    "doctor",
    "plan",
    "plan profiles",
    "workload analyze demo",
    "simulate demo --limit 20 --compare kv,round-robin,random,least-loaded",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """A mesh with traffic; one of its workers has a long name."""
    folder: Path = tmp_path_factory.mktemp("up")
    up = Up(folder, "--workers", "1", "--planner", "--worker-labels", "zone=eu-central-1a-rack-b")
    up.start()
    worker = None
    try:
        await up.ready()
        with (folder / "worker.log").open("wb") as log:
            worker = forks.start(["worker", "--name", NAME], environment(up), log, log)
        await eventually(lambda: NAME in kvmesh(up, "status").stdout)
        async with client_session() as session:
            client = Client(up.url, session)
            for turn in range(6):
                control = {"session_id": "agent-of-the-billing-service-7"}
                message = {"role": "user", "content": "Tell the story again. " * 60 * (turn + 1)}
                body = {"model": MODEL, "messages": [message], "max_tokens": 4}
                body["nvext"] = {"session_control": control}
                status, answer = await client.post("/v1/chat/completions", body)
                assert status == 200, answer
        await eventually(lambda: "wanted" in kvmesh(up, "plan").stdout)
        yield up
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait(PATIENCE_S)
        up.close()


def environment(up: Up) -> Mapping[str, str]:
    own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    return {**own, "KVMESH_UP_STATE_DIR": str(up.token_file.parent), "NO_COLOR": "1"}


def kvmesh(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run(arguments, environment(up))


def words(command: str, up: Up) -> list[str]:
    if "REQUEST" not in command:
        return command.split()
    slow = kvmesh(up, "explain", "--slow", "--limit", "1", "--json").stdout
    return command.replace("REQUEST", json.loads(slow)["request"]).split()


def in_terminal(up: Up, arguments: list[str], columns: int) -> str:
    terminal = Terminal(arguments, environment(up), columns)
    try:
        terminal.ended()
        return terminal.output.replace("\r\n", "\n")
    finally:
        terminal.close()


@pytest.mark.parametrize("command", COMMANDS)
async def test_names_are_whole_at_every_width(up: Up, command: str) -> None:
    arguments = words(command, up)
    piped = await asyncio.to_thread(kvmesh, up, *arguments)
    assert piped.returncode == 0, piped.stderr
    assert "hidden at" not in piped.stdout
    named = set(re.findall(r"[a-z][\w-]*-[0-9a-f]{8,}", piped.stdout))
    shown = (asyncio.to_thread(in_terminal, up, arguments, width) for width in WIDTHS)
    for width, text in zip(WIDTHS, await asyncio.gather(*shown), strict=True):
        assert "…" not in text
        note = "hidden at" in text
        if command.startswith(("status", "top --once --view fleet")):
            for name in named:
                assert re.search(rf"^{name}▲? +(.*)\b(ready|leads)\b", text, re.M), text
        elif named and not note:
            assert not [name for name in named if name not in re.sub(r"\s+", " ", text)]
        table = [line for line in text.splitlines() if line.startswith(tuple(named))]
        assert all(len(line) <= width for line in table), text


async def test_a_narrow_terminal_names_the_columns_that_it_hides(up: Up) -> None:
    text = await asyncio.to_thread(in_terminal, up, ["status"], 80)
    note = next(line for line in text.splitlines() if line.startswith("hidden at 80 columns"))
    for heading in ("labels", "load"):
        assert heading in note
    wide = kvmesh(up, "status").stdout
    assert "zone=eu-central-1a-rack-b" in wide
    row = next(line for line in wide.splitlines() if line.startswith(NAME))
    assert re.search(rf"worker .* ready .* {MODEL} .* running, .* blocks", row)


async def test_the_screen_of_top_fits(up: Up) -> None:
    def use() -> None:
        screen = Terminal(["top"], environment(up), 80)
        try:
            screen.shows(NAME)
            screen.shows("ready")
            screen.shows("hidden at 80 columns")
            screen.press("q")
            assert screen.ended() == 0
        finally:
            screen.close()

    await asyncio.to_thread(use)
