"""Codex, headless, on /v1/responses."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from harnesses.tours import MANY
from support.harness import KEY, ClientResult, LimitedMesh, Recorder, Workspace
from support.tap import Tap, assert_grows, shared
from support.up import Up
from support.wait import eventually

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
CONFIG = """\
model = "kvmesh-demo"
model_provider = "kvmesh"
model_catalog_json = "{catalog}"
check_for_update_on_startup = false

[model_providers.kvmesh]
name = "kvmesh"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KVMESH_API_KEY"
{provider}

[analytics]
enabled = false
"""
LONG = 500  # tokens of an answer
SOCKETS = "supports_websockets = true"
MODEL = {
    "slug": "kvmesh-demo",
    "display_name": "kvmesh demo",
    "description": "The model of the tests.",
    "base_instructions": "You are a coding agent.",
    "context_window": 262144,
    "shell_type": "unified_exec",
    "apply_patch_tool_type": "freeform",
    "input_modalities": ["text"],
    "supported_reasoning_levels": [],
    "supports_reasoning_summaries": True,
    "support_verbosity": False,
    "supports_parallel_tool_calls": True,
    "experimental_supported_tools": [],
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "supported_in_api": True,
    "visibility": "list",
    "priority": 1,
}


async def codex(
    url: str, workspace: Workspace, *arguments: str, more: str = "", provider: str = ""
) -> ClientResult:
    """Run `codex exec` with its shell enabled; `more` is appended to its configuration."""
    configure(workspace.home / ".codex", url, more, provider)
    flags = ("--json", "--dangerously-bypass-approvals-and-sandbox")
    return await workspace.run(
        "codex", "exec", *flags, *arguments, env={"KVMESH_API_KEY": KEY, "RUST_LOG": "off"}
    )


def configure(folder: Path, url: str, more: str, provider: str = "") -> None:
    folder.mkdir(exist_ok=True)
    catalog = folder / "models.json"
    catalog.write_text(json.dumps({"models": [MODEL]}))
    (folder / "config.toml").write_text(
        CONFIG.format(url=url, catalog=catalog, provider=provider) + more
    )


def agent_messages(done: ClientResult) -> list[str]:
    """The agent's messages; asserts that its turn completed without an error."""
    kinds = [event["type"] for event in done.events]
    assert done.status == 0, done
    assert kinds[-1] == "turn.completed", done
    items = [event["item"] for event in done.events if event["type"] == "item.completed"]
    assert not [item for item in items if item["type"] == "error"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


async def test_it_uses_a_tool_and_answers(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await codex(recorder.url, workspace, "Please make codex.txt")
    assert agent_messages(done) == ["I make the file.", "The file codex.txt is made."]
    assert (workspace.repository / "codex.txt").read_text() == "made-by-codex\n"
    assert [seen.status for seen in recorder.requests] == [200, 200]
    works = tap.of(done.events[0]["thread_id"])
    assert_grows(works)
    outcomes = [await tap.outcome(work) for work in works]
    assert [(outcome.agent, outcome.waits_for) for outcome in outcomes] == [
        ("codex", ["tool", "exec_command", "cat"]),
        ("codex", ["human"]),
    ]
    usage = done.events[-1]["usage"]
    assert usage["cached_input_tokens"] > len(works[0].tokens) // 4 - 16
    assert usage["reasoning_output_tokens"] > 0
    second = tap.text(works[1])
    assert "I write the file first.\n</think>" in second
    assert "turn_id" not in second
    assert done.events[0]["thread_id"] not in second


async def test_another_conversation_shares_tools_and_instructions(
    mesh: Up, tap: Tap, workspace: Workspace
) -> None:
    for _ in range(2):
        agent_messages(await codex(mesh.url, workspace, "Please make codex.txt"))
    first, _, again, _ = tap.works
    assert again.tokens == first.tokens


async def test_it_patches_files_by_a_custom_tool(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await codex(recorder.url, workspace, "Patch it")
    assert agent_messages(done) == ["It is patched."]
    assert (workspace.repository / "patched.txt").read_text() == "made-by-patch\n"
    kinds = [item["type"] for item in recorder.requests[1].body["input"]]
    assert kinds[-2:] == ["custom_tool_call", "custom_tool_call_output"]
    assert_grows(tap.works)


async def test_a_subagent_belongs_to_its_parent(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await codex(recorder.url, workspace, "Spawn one")
    assert "The other has counted." in agent_messages(done)
    parent = done.events[0]["thread_id"]
    kinds = {((await tap.outcome(work)).agent, work.session == parent) for work in tap.works}
    assert kinds == {("codex", True), ("codex/subagent", False)}
    items = (item for seen in recorder.requests for item in seen.body["input"])
    call = next(item for item in items if item["type"] == "function_call")
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "spawn_agent")
    hints = {(d.hints.session, d.hints.parent_session) for d in tap.decisions}
    children = {session for session, above in hints if above == parent}
    assert hints == {(parent, None), *((child, parent) for child in children)}
    assert len(children) == 1
    assert_grows(tap.of(parent))


async def test_it_compacts_a_long_conversation(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await codex(recorder.url, workspace, "Count far")
    assert agent_messages(done) == ["That was far."]
    thread = done.events[0]["thread_id"]
    limit = ("-c", "model_auto_compact_token_limit=10000")
    done = await codex(recorder.url, workspace, *limit, "resume", thread, "What next?")
    assert agent_messages(done) == ["Nothing more."]
    kinds = [json.loads(seen.headers["x-codex-turn-metadata"]) for seen in recorder.requests]
    assert [kind["request_kind"] for kind in kinds] == ["turn", "turn", "compaction", "turn"]
    assert recorder.requests[2].body["tools"] == []
    assert {seen.status for seen in recorder.requests} == {200}
    assert shared(tap.works[0], tap.works[3]) > len(tap.works[0].tokens) // 8


def posted(lines: list[str]) -> list[str]:
    """The methods of the responses in lines of the access log."""
    return [word for line in lines for word in line.split() if word in ("POST", "WEBSOCKET")]


async def test_it_works_over_a_websocket(mesh: Up, tap: Tap, workspace: Workspace) -> None:
    before = len(mesh.lines)
    done = await codex(mesh.url, workspace, "Please make codex.txt", provider=SOCKETS)
    assert agent_messages(done) == ["I make the file.", "The file codex.txt is made."]
    assert (workspace.repository / "codex.txt").read_text() == "made-by-codex\n"
    thread = done.events[0]["thread_id"]
    works = tap.of(thread)
    assert_grows(works)
    outcomes = [await tap.outcome(work) for work in works]
    assert [(outcome.agent, outcome.waits_for) for outcome in outcomes] == [
        ("codex", ["tool", "exec_command", "cat"]),
        ("codex", ["human"]),
    ]
    assert "I write the file first.\n</think>" in tap.text(works[1])
    await eventually(lambda: " 101 " in "\n".join(mesh.lines[before:]))
    sent = [line for line in mesh.lines[before:] if "/v1/responses" in line]
    assert posted(sent) == ["WEBSOCKET"] * 3, sent  # the first one computes the prompt ahead
    assert all(" 200 " in line or " 101 " in line for line in sent), sent


async def test_its_answer_over_a_websocket_survives_a_worker(
    tour_mesh: Up, workspace: Workspace
) -> None:
    """The other worker continues the answer, and the session resumes on another connection."""
    async with Tap().listening(tour_mesh.options) as tap:
        asked = codex(tour_mesh.url, workspace, "Write at length", provider=SOCKETS)
        answering = asyncio.create_task(asked)

        def long_answer() -> str | None:
            known = tap.generated.items()
            return next((name for name, tokens in known if len(tokens) > LONG), None)

        request = await eventually(long_answer)
        assert request is not None
        decision = next(each for each in tap.decisions if each.request == request)
        name = decision.chosen.instance.rpartition("-")[0]
        os.kill(tour_mesh.children()[name], signal.SIGKILL)
        done = await answering
        assert agent_messages(done)[-1].endswith(f"{MANY * 4} (long-0)")
        assert (await tap.outcome_of(request)).attempts == 2
        thread = done.events[0]["thread_id"]
        again = await codex(
            tour_mesh.url, workspace, "resume", thread, "And then?", provider=SOCKETS
        )
        assert agent_messages(again) == ["That was long (long-1)."]


async def test_it_waits_after_a_429(limited: LimitedMesh, workspace: Workspace) -> None:
    async with limited.at_limit() as recorder:
        done = await codex(recorder.url, workspace, "Please make codex.txt")
    assert agent_messages(done)[-1] == "The file codex.txt is made."
    statuses = [seen.status for seen in recorder.requests]
    assert statuses[0] == 429
    assert statuses[-2:] == [200, 200]
    assert json.loads(recorder.requests[0].answer)["error"]["code"] == "rate_limit_exceeded"


async def test_it_reports_an_exceeded_context(small: Up, workspace: Workspace) -> None:
    done = await codex(small.url, workspace, "Read this: " + "some words of it " * 6000)
    assert done.status == 1
    assert "ran out of room in the model's context window" in done.events[-1]["error"]["message"]
