"""The commands in console blocks of README and docs run as they stand, against a live mesh."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.console_blocks import ConsoleCommand, console_commands
from support.frontend import MODEL, Client, client_session
from support.nats import free_port
from support.up import Up
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
RUN = [each for each in console_commands() if not each.reason and not each.fails]
UPS = [each for each in RUN if each.kvmesh[:1] == ["up"]]
OTHERS = [each for each in RUN if each not in UPS]
SESSIONS = ("demo", "s1", "s2", "s3", "run:main")
FILES = ("trace.jsonl", "chats.jsonl", "agents.json", "more.jsonl", "more.json", "traces/a.json")
FOLLOWS_S = 10.0  # of a command that never ends


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """A mesh with the sessions that the docs name, and in its folder the files that they name."""
    up = Up(
        tmp_path_factory.mktemp("up"), "--workers", "2", "--planner", "--no-frontend-keys-bucket"
    )
    up.start()
    try:
        await up.ready()
        async with client_session() as session:
            client = Client(up.url, session)
            for name in SESSIONS:
                message = {"role": "user", "content": "Tell the story again. " * 60}
                body = {"model": MODEL, "messages": [message], "max_tokens": 4}
                body["nvext"] = {"session_control": {"session_id": name}}
                status, answer = await client.post("/v1/chat/completions", body)
                assert status == 200, answer
        (up.folder / "traces").mkdir()
        for name in FILES:
            made = shell(up, f"kvmesh workload generate demo --sessions 4 -o {name}")
            assert made.returncode == 0, made.stderr
        (up.folder / "output.txt").write_text("Hello")
        await eventually(lambda: shell(up, "kvmesh plan").returncode == 0)
        yield up
    finally:
        up.close()


def environment(up: Up) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    home = str(up.folder)  # some blocks write below it
    return {**own, "HOME": home, "PATH": path, "KVMESH_UP_STATE_DIR": str(up.token_file.parent)}


def shell(up: Up, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["timeout", str(PATIENCE_S), "bash", "-c", text],
        env=environment(up),
        cwd=up.folder,
        capture_output=True,
        text=True,
    )


def adapted(up: Up, command: ConsoleCommand) -> str:
    """The command for this mesh: its port, and a request of it in place of the example's."""
    text = re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{up.port}", command.text)
    if command.kvmesh[:1] in (["replay"], ["tool"]):
        text = re.sub(r"(kvmesh \w+)", rf"\1 --url {up.url}", text, count=1)
    if command.page == "api.md":
        text = text.replace("keys add ci", "keys add api")  # docs/cli.md adds that one
    if "chatcmpl-" in text:
        slow = shell(up, "kvmesh explain --slow --limit 1 --json").stdout
        text = re.sub(r"chatcmpl-\w+", json.loads(slow)["request"], text)
    return text


@pytest.mark.parametrize("command", OTHERS, ids=lambda each: f"{each.page}:{each.line}")
async def test_a_command_runs(up: Up, command: ConsoleCommand) -> None:
    text = adapted(up, command)
    if command.kvmesh == ["tail"]:
        text = f"timeout {FOLLOWS_S:g} {text}; test $? = 124"
    done = await asyncio.to_thread(shell, up, text)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    if text.startswith("curl"):
        assert '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize("command", UPS, ids=lambda each: f"{each.page}:{each.line}")
async def test_a_mesh_starts_and_stops(command: ConsoleCommand, tmp_path: Path) -> None:
    ports = {"FRONTEND_PORT": free_port(), "UP_NATS_PORT": free_port()}
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    env |= {f"KVMESH_{name}": str(port) for name, port in ports.items()}
    env["KVMESH_UP_DASHBOARD"] = "false"
    if "./tiny" in command.text:
        made = [sys.executable, "-m", "kvmesh.cli.main", "model", "tiny", "./tiny"]
        await asyncio.to_thread(subprocess.run, made, cwd=tmp_path, check=True, env=env)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli.main", *command.kvmesh),
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines: list[str] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            lines.append(line.decode())  # noqa: PERF401

    reading = asyncio.create_task(read())
    try:
        await eventually(lambda: "ready after" in "".join(lines) or reading.done(), 2 * PATIENCE_S)
        assert "ready after" in "".join(lines), "".join(lines)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0, "".join(lines)
    finally:
        if process.returncode is None:
            process.kill()
        await reading
