"""The commands in console blocks of README and docs run as they stand, against a live mesh."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO

import pytest
import pytest_asyncio
from support import forks
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
SYNTAX = re.compile(r"[$~*?<>|&;`(){}]")  # of a shell
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
    """Run a command of a shell, or of `kvmesh` alone without one."""
    if text.startswith("kvmesh ") and not SYNTAX.search(text):
        return forks.run(shlex.split(text, comments=True)[1:], environment(up), cwd=up.folder)
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
    # one worker where the command names no number: each of torch's takes 4 CPU seconds to start
    env |= {"KVMESH_UP_DASHBOARD": "false", "KVMESH_UP_WORKERS": "1", "KVMESH_TORCH_THREADS": "1"}
    if "./tiny" in command.text:
        made = forks.run(["model", "tiny", "./tiny"], env, cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    log = tmp_path / "up.log"
    with log.open("wb") as output:
        process = begin(command, tmp_path, env, output)

    def ready() -> bool:
        return "ready after" in log.read_text()

    try:
        await eventually(lambda: ready() or process.poll() is not None, 2 * PATIENCE_S)
        assert ready(), log.read_text()
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None)
        assert process.poll() == 0, log.read_text()
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def begin(
    command: ConsoleCommand, folder: Path, env: Mapping[str, str], output: IO[bytes]
) -> forks.Process:
    """Start the command; those of README as a shell does, by new interpreters."""
    if command.page != "README.md":
        return forks.start(command.kvmesh, env, output, output, folder)
    words = [sys.executable, "-m", "kvmesh.cli.main", *command.kvmesh]
    return subprocess.Popen(words, cwd=folder, env=env, stdout=output, stderr=output)
