"""Long sessions of real clients, whose calls return in other words than the model's.

Each turn finds in the cache what it would find if the client returned every answer as generated.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from harnesses.conftest import StartTour, Touring
from harnesses.test_claude_code import claude as run_claude
from harnesses.test_codex import agent_messages
from harnesses.test_codex import codex as run_codex
from harnesses.test_frameworks import PYTHON
from harnesses.test_opencode import PATHS, QUIET, configure, texts
from harnesses.tours import MANY
from support.harness import KEY, ClientResult, Workspace
from support.shares import turns
from support.up import Up
from support.wait import eventually

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
SERVER = Path(__file__).with_name("mcp_server.py")
MCP = {"mcpServers": {"big": {"command": sys.executable, "args": [str(SERVER)]}}}
LIMIT_S = 240.0
TOURED, LISTED = "That was the tour", "There is a file"
LONG = 500  # tokens of an answer
# tokens of context, with which a client compacts the session that it resumes
SHORT = {"opencode": 38_000, "pi": 7_000}
Ask = Callable[[Touring, str, bool], Coroutine[Any, Any, str]]


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
    assert result["result"].startswith(TOURED)
    session = result["session_id"]
    result = await claude(tour, "And then?", "--resume", session)
    assert result["result"].startswith(LISTED)
    await claude(tour, "/compact", "--resume", session)
    result = await claude(tour, "What next?", "--resume", session)
    assert result["result"] == "Nothing more (claude-end)."
    await tour.assert_as_replayed()


async def test_claude_code_in_another_folder(start_tour: StartTour) -> None:
    """Its switch moves what names the folder behind the tools."""
    shares = {}
    for flags in ([], ["--exclude-dynamic-system-prompt-sections"]):
        name = "".join(flags) or "default"
        for place in ("one", "two"):
            tour = await start_tour(f"folder{name}", f"folder-{place}")
            await run_claude(tour.url, tour.workspace, f"Hello, {place}", *flags)
        (turn, *_) = await turns(tour.recorder.requests, tour.tap)
        shares[name] = turn.cached / turn.prompt
        print(f"{name}: {turn.cached} of {turn.prompt} tokens, {shares[name]:.1%}")
    assert shares[name] > 0.7


async def test_codex(start_tour: StartTour) -> None:
    tour = await start_tour("codex")
    server = f'[mcp_servers.big]\ncommand = "{sys.executable}"\nargs = ["{SERVER}"]\n'
    done = await run_codex(tour.url, tour.workspace, "Tour of codex", more=server)
    assert any(text.startswith(TOURED) for text in agent_messages(done))
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
    assert texts(done)[-1].startswith(TOURED)
    done = await opencode(tour, package, "--continue", "And then?")
    assert texts(done)[-1].startswith(LISTED)
    done = await opencode(tour, package, "--continue", "Go on", context=SHORT["opencode"])
    assert texts(done)[-1] == "Nothing more (opencode-10)."
    assert summarized(tour, "anchored summary")
    await tour.assert_as_replayed()


async def opencode(
    tour: Touring, package: str, *arguments: str, context: int = 262144
) -> ClientResult:
    """With a short `context`, it compacts the session."""
    configuration = configure(tour.url, package, context)
    command = [sys.executable, str(SERVER)]
    configuration["mcp"] = {"big": {"type": "local", "command": command, "enabled": True}}
    (tour.workspace.repository / "opencode.json").write_text(json.dumps(configuration))
    command = ["run", "--format", "json", *arguments]
    return await tour.workspace.run("opencode", *command, env=QUIET, timeout=LIMIT_S)


def summarized(tour: Touring, instruction: str) -> bool:
    """True if the client has asked for a summary of the session with this instruction."""
    return any(instruction in json.dumps(request.body) for request in tour.recorder.requests)


PI_APIS = ("openai-completions", "openai-responses", "anthropic-messages")


@pytest.mark.parametrize("api", PI_APIS)
async def test_pi(start_tour: StartTour, api: str) -> None:
    tour = await start_tour(f"pi-{api}", "pi")
    assert (await pi(tour, api, "Tour of pi")).startswith(TOURED)
    assert (await pi(tour, api, "--continue", "And then?")).startswith(LISTED)
    last = await pi(tour, api, "--continue", "Go on", context=SHORT["pi"])
    assert last == "Nothing more (pi-9)."
    assert summarized(tour, "context summarization assistant")
    await tour.assert_as_replayed()


async def pi(tour: Touring, api: str, *arguments: str, context: int = 262144) -> str:
    """With a short `context`, it compacts the session."""
    base = tour.url if api.startswith("anthropic") else f"{tour.url}/v1"
    model = {"id": "kvmesh-demo", "reasoning": True, "contextWindow": context, "maxTokens": 16384}
    provider = {"baseUrl": base, "api": api, "apiKey": KEY, "models": [model]}
    folder = tour.workspace.home / ".pi/agent"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"kvmesh": provider}}))
    kept = {"compaction": {"reserveTokens": 4096, "keepRecentTokens": 300}}
    (folder / "settings.json").write_text(json.dumps(kept))
    quiet = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
    command = ["--model", "kvmesh/kvmesh-demo", "--print", *arguments]
    done = await tour.workspace.run("pi", *command, env=quiet, timeout=LIMIT_S)
    assert done.status == 0, done
    return done.output.strip()


async def test_qwen_code(start_tour: StartTour) -> None:
    tour = await start_tour("qwen")
    env = {
        "OPENAI_BASE_URL": f"{tour.url}/v1",
        "OPENAI_API_KEY": KEY,
        "OPENAI_MODEL": "kvmesh-demo",
        "QWEN_TELEMETRY_ENABLED": "false",
    }
    for prompt, last in (
        (["Tour of qwen"], TOURED),
        (["--continue", "And then?"], LISTED),
    ):
        command = ["--auth-type", "openai", "--approval-mode", "yolo", *prompt]
        done = await tour.workspace.run("qwen", *command, env=env, timeout=LIMIT_S)
        assert done.status == 0, done
        assert last in done.output, done
    await tour.assert_as_replayed()


async def test_continue(start_tour: StartTour) -> None:
    tour = await start_tour("continue")
    file = tour.workspace.home / "config.yaml"
    model = {"name": "kvmesh", "provider": "openai", "model": "kvmesh-demo"}
    model |= {"apiBase": f"{tour.url}/v1", "apiKey": KEY}
    tools = {"roles": ["chat"], "capabilities": ["tool_use"]}
    config = {"name": "kvmesh", "version": "1.0.0", "schema": "v1", "models": [model | tools]}
    file.write_text(json.dumps(config))  # which is YAML, too
    env = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}
    for prompt, last in (
        (["Tour of continue"], TOURED),
        (["--resume", "And then?"], LISTED),
    ):
        command = ["--config", str(file), "--auto", "--print", *prompt]
        done = await tour.workspace.run("cn", *command, env=env, timeout=LIMIT_S)
        assert done.status == 0, done
        assert last in done.output, done
    await tour.assert_as_replayed()


async def test_cline(start_tour: StartTour) -> None:
    tour = await start_tour("cline")
    assert (await cline(tour, "Tour of cline")).startswith(TOURED)
    await tour.assert_as_replayed()


async def test_a_worker_is_killed_under_cline(start_tour: StartTour, tour_mesh: Up) -> None:
    """Cline resumes sessions in a terminal alone, so there is no second turn."""
    tour = await start_tour("killed-cline", "long")
    answering = asyncio.create_task(cline(tour, "Write at length"))
    await kill_its_worker(tour, tour_mesh)
    assert (await answering).endswith(f"{MANY * 4} (long-0)")


async def cline(tour: Touring, prompt: str) -> str:
    """The last text of a session."""
    provider = ("-k", KEY, "-b", f"{tour.url}/v1", "-m", "kvmesh-demo")
    quiet = {"CLINE_TELEMETRY_DISABLED": "1"}
    known = await tour.workspace.run("cline", "auth", "openai", *provider, env=quiet)
    assert known.status == 0, known
    done = await tour.workspace.run("cline", "--json", prompt, env=quiet, timeout=LIMIT_S)
    assert done.status == 0, done
    return str(done.events[-1]["text"])


async def test_mini_swe_agent(start_tour: StartTour) -> None:
    tour = await start_tour("mini")
    assert await mini(tour, "Tour of mini") == "Submitted"
    assert (tour.workspace.repository / "notes.txt").exists()
    await tour.assert_as_replayed()


async def mini(tour: Touring, task: str) -> str:
    """The status with which a run has ended."""
    env = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_API_BASE": f"{tour.url}/v1",
        "OPENAI_API_KEY": KEY,
    }
    told = tour.workspace.home / "trajectory.json"
    flags = ("--yolo", "--exit-immediately", "--output", str(told), "--cost-limit", "0")
    command = ["--model", "openai/kvmesh-demo", "--task", task, *flags]
    done = await tour.workspace.run(PYTHON.with_name("mini"), *command, env=env, timeout=LIMIT_S)
    assert done.status == 0, done
    return str(json.loads(told.read_text())["info"]["exit_status"])


COPILOT_WIRES = {
    "chat": {"COPILOT_PROVIDER_WIRE_API": "completions"},
    "responses": {"COPILOT_PROVIDER_WIRE_API": "responses"},
    "messages": {"COPILOT_PROVIDER_TYPE": "anthropic"},
}
SOCKETS = {**COPILOT_WIRES["responses"], "COPILOT_PROVIDER_TRANSPORT": "websockets"}


@pytest.mark.parametrize("wire", COPILOT_WIRES)
async def test_copilot(start_tour: StartTour, wire: str) -> None:
    tour = await start_tour(f"copilot-{wire}", "copilot")
    base = tour.url if wire == "messages" else f"{tour.url}/v1"
    told = await copilot(base, tour.workspace, COPILOT_WIRES[wire], "Tour of copilot")
    assert told[-1].startswith(TOURED)
    told = await copilot(base, tour.workspace, COPILOT_WIRES[wire], "And then?", "--continue")
    assert told[-1].startswith(LISTED)
    assert {seen.status for seen in tour.recorder.requests} == {200}
    found = await tour.assert_as_replayed()
    outcomes = [await tour.tap.outcome_of(turn.request.id) for turn in found]
    assert {outcome.agent.partition("/")[0] for outcome in outcomes} == {"copilot"}


async def test_copilot_over_a_websocket(start_tour: StartTour, tour_mesh: Up) -> None:
    tour = await start_tour("copilot-sockets", "copilot")
    before = len(tour_mesh.lines)
    told = await copilot(f"{tour_mesh.url}/v1", tour.workspace, SOCKETS, "Tour of copilot")
    assert told[-1].startswith(TOURED)
    await eventually(lambda: " 101 " in "\n".join(tour_mesh.lines[before:]))
    posted = [line for line in tour_mesh.lines[before:] if "/v1/responses" in line]
    assert not [line for line in posted if " POST " in line]
    assert all(" 200 " in line or " 101 " in line for line in posted), posted


async def copilot(
    base: str, workspace: Workspace, wire: dict[str, str], prompt: str, *flags: str
) -> list[str]:
    """The client's texts; it runs without a login, and reaches nothing but the mesh."""
    env = {
        "COPILOT_PROVIDER_BASE_URL": base,
        "COPILOT_PROVIDER_API_KEY": KEY,
        "COPILOT_MODEL": "kvmesh-demo",
        "COPILOT_OFFLINE": "true",
        **wire,
    }
    command = ["-p", prompt, "--allow-all-tools", "--output-format", "json", *flags]
    done = await workspace.run("copilot", *command, env=env, timeout=LIMIT_S)
    assert done.status == 0, done
    said = (event["data"] for event in done.events if event["type"] == "assistant.message")
    return [text for data in said if (text := data["content"])]


async def ask_claude(tour: Touring, prompt: str, again: bool) -> str:
    result = await claude(tour, prompt, *(["--continue"] if again else []))
    return str(result["result"])


async def ask_codex(tour: Touring, prompt: str, again: bool) -> str:
    resume = ["resume", "--last"] if again else []
    return agent_messages(await run_codex(tour.url, tour.workspace, *resume, prompt))[-1]


async def ask_opencode(tour: Touring, prompt: str, again: bool) -> str:
    more = ["--continue"] if again else []
    return texts(await opencode(tour, "@ai-sdk/openai-compatible", *more, prompt))[-1]


async def ask_pi(tour: Touring, prompt: str, again: bool) -> str:
    return await pi(tour, "openai-completions", *(["--continue"] if again else []), prompt)


async def ask_copilot(tour: Touring, prompt: str, again: bool) -> str:
    flags = ["--continue"] if again else []
    told = await copilot(f"{tour.url}/v1", tour.workspace, COPILOT_WIRES["chat"], prompt, *flags)
    return told[-1]


@pytest.mark.parametrize("ask", [ask_claude, ask_codex, ask_copilot, ask_opencode, ask_pi])
async def test_a_worker_is_killed(start_tour: StartTour, tour_mesh: Up, ask: Ask) -> None:
    """The other worker continues the answer, and then holds all of it."""
    tour = await start_tour(f"killed-{ask.__name__}", "long")
    answering = asyncio.create_task(ask(tour, "Write at length", False))
    request = await kill_its_worker(tour, tour_mesh)
    assert (await answering).endswith(f"{MANY * 4} (long-0)")
    assert (await tour.tap.outcome_of(request)).attempts == 2
    assert await ask(tour, "And then?", True) == "That was long (long-1)."
    await tour.assert_as_replayed()


async def kill_its_worker(tour: Touring, mesh: Up) -> str:
    """Kill the worker of a long answer; return the request."""
    request = await eventually(lambda: long_answer(tour))
    assert request is not None
    decision = next(each for each in tour.tap.decisions if each.request == request)
    os.kill(mesh.children()[decision.chosen.instance.rpartition("-")[0]], signal.SIGKILL)
    return request


def long_answer(tour: Touring) -> str | None:
    """The request of which a good part of a long answer has been generated."""
    known = tour.tap.generated.items()
    return next((name for name, tokens in known if len(tokens) > LONG), None)
