"""Long sessions of real clients, whose calls return in other words than the model's.

Each turn finds in the cache what it would find if the client returned every answer as generated.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harnesses.conftest import StartTour, Touring
from harnesses.test_claude_code import claude as run_claude
from harnesses.test_codex import agent_messages
from harnesses.test_codex import codex as run_codex
from harnesses.test_opencode import PATHS, QUIET, configure, texts
from support.harness import KEY, ClientResult

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
SERVER = Path(__file__).with_name("mcp_server.py")
MCP = {"mcpServers": {"big": {"command": sys.executable, "args": [str(SERVER)]}}}
LIMIT_S = 240.0


async def claude(tour: Touring, prompt: str, *flags: str) -> dict[str, Any]:
    file = tour.workspace.home / "mcp.json"
    file.write_text(json.dumps(MCP))
    tools = "Bash,Edit,Write,Read,Agent,ToolSearch,mcp__big"
    options = ("--mcp-config", str(file), "--strict-mcp-config", "--allowedTools", tools)
    done = await run_claude(tour.url, tour.workspace, prompt, *options, *flags)
    assert done.status == 0, done
    result: dict[str, Any] = done.events[-1]
    return result


async def test_claude_code(start_tour: StartTour) -> None:
    tour = await start_tour("claude")
    prompt = "hook-check: may this call run? $ARGUMENTS"
    hooks = [{"matcher": "Bash", "hooks": [{"type": "prompt", "prompt": prompt}]}]
    folder = tour.workspace.home / ".claude"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"hooks": {"PreToolUse": hooks}}))
    result = await claude(tour, "Tour of claude")
    assert result["result"] == "That was the tour (claude-7)."
    session = result["session_id"]
    result = await claude(tour, "And then?", "--resume", session)
    assert result["result"] == "There are notes (claude-9)."
    await claude(tour, "/compact", "--resume", session)
    result = await claude(tour, "What next?", "--resume", session)
    assert result["result"] == "Nothing more (claude-10)."
    await tour.assert_as_replayed()


async def test_codex(start_tour: StartTour) -> None:
    tour = await start_tour("codex")
    server = f'[mcp_servers.big]\ncommand = "{sys.executable}"\nargs = ["{SERVER}"]\n'
    done = await run_codex(tour.url, tour.workspace, "Tour of codex", more=server)
    assert "That was the tour (codex-6)." in agent_messages(done)
    thread = done.events[0]["thread_id"]
    done = await run_codex(tour.url, tour.workspace, "resume", thread, "And then?", more=server)
    assert agent_messages(done)
    limit = ("-c", "model_auto_compact_token_limit=9000")
    done = await run_codex(tour.url, tour.workspace, *limit, "resume", thread, "Next?", more=server)
    assert agent_messages(done)[-1] == "Nothing more (codex-9)."
    await tour.assert_as_replayed()


@pytest.mark.parametrize("package", PATHS)
async def test_opencode(start_tour: StartTour, package: str) -> None:
    api = package.rpartition("/")[2]
    tour = await start_tour(f"opencode-{api}", "opencode")
    done = await opencode(tour, package, "Tour of opencode")
    assert texts(done)[-1] == "That was the tour (opencode-5)."
    done = await opencode(tour, package, "--continue", "And then?")
    assert texts(done)[-1] == "There is a file (opencode-7)."
    await tour.assert_as_replayed()


async def opencode(tour: Touring, package: str, *arguments: str) -> ClientResult:
    configuration = configure(tour.url, package)
    command = [sys.executable, str(SERVER)]
    configuration["mcp"] = {"big": {"type": "local", "command": command, "enabled": True}}
    (tour.workspace.repository / "opencode.json").write_text(json.dumps(configuration))
    command = ["run", "--format", "json", *arguments]
    return await tour.workspace.run("opencode", *command, env=QUIET, timeout=LIMIT_S)


PI_APIS = ("openai-completions", "openai-responses", "anthropic-messages")


@pytest.mark.parametrize("api", PI_APIS)
async def test_pi(start_tour: StartTour, api: str) -> None:
    tour = await start_tour(f"pi-{api}", "pi")
    base = tour.url if api.startswith("anthropic") else f"{tour.url}/v1"
    model = {"id": "kvmesh-demo", "reasoning": True, "contextWindow": 262144, "maxTokens": 16384}
    provider = {"baseUrl": base, "api": api, "apiKey": KEY, "models": [model]}
    folder = tour.workspace.home / ".pi/agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"kvmesh": provider}}))
    quiet = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
    for prompt, last in (
        (["Tour of pi"], "That was the tour (pi-4)."),
        (["--continue", "And then?"], "There is a file (pi-6)."),
    ):
        command = ["--model", "kvmesh/kvmesh-demo", "--print", *prompt]
        done = await tour.workspace.run("pi", *command, env=quiet, timeout=LIMIT_S)
        assert done.status == 0, done
        assert done.output.strip().endswith(last), done
    await tour.assert_as_replayed()
