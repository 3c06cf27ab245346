"""Claude Code, headless, on /v1/messages."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from harnesses.conftest import SMALL, MakeMesh
from support.harness import KEY, ClientResult, LimitedMesh, RecordedRequest, Recorder, Workspace
from support.tap import Tap, assert_grows, shared
from support.up import Up

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
SETTINGS = {
    "ANTHROPIC_API_KEY": KEY,
    "ANTHROPIC_MODEL": "kvmesh-demo",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "kvmesh-demo",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "262144",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}


async def claude(url: str, workspace: Workspace, prompt: str, *flags: str) -> ClientResult:
    """Run it with one prompt; it may use its shell."""
    arguments = ("-p", prompt, "--output-format", "json", "--allowedTools", "Bash", *flags)
    return await workspace.run("claude", *arguments, env={**SETTINGS, "ANTHROPIC_BASE_URL": url})


async def test_it_uses_a_tool_and_answers(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await claude(recorder.url, workspace, "Please make claude.txt")
    assert done.status == 0, done
    result = done.events[-1]
    assert result["result"] == "The file claude.txt is made."
    assert (result["is_error"], result["api_error_status"]) == (False, None)
    assert result["num_turns"] == 2
    assert (workspace.repository / "claude.txt").read_text() == "made-by-claude\n"
    assert [seen.status for seen in recorder.requests] == [200, 200]
    works = tap.of(result["session_id"])
    assert_grows(works)
    assert result["usage"]["cache_read_input_tokens"] >= len(works[0].tokens) // 4
    first, second = (tap.text(work) for work in works)
    assert "x-anthropic-billing-header" not in first
    assert "I write the file first.\n</think>" in second


async def test_another_conversation_shares_tools_and_system_prompt(
    recorder: Recorder, workspace: Workspace, mesh: Up
) -> None:
    await claude(mesh.url, workspace, "Please make claude.txt")
    done = await claude(recorder.url, workspace, "Please make again.txt")
    assert done.status == 0, done
    start, *_ = events(recorder.requests[0])
    usage = start["message"]["usage"]
    assert usage["cache_read_input_tokens"] > usage["cache_creation_input_tokens"]


async def test_another_folder_shares_all_that_is_constant(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    mesh = make_mesh("--mock-speedup", "20", "--frontend-share-prefixes")
    await mesh.ready()
    shares = []
    for name in ("one", "two"):
        async with Recorder(mesh.url).listening() as recorder:
            done = await claude(recorder.url, Workspace(tmp_path / name), "Please make claude.txt")
            assert done.events[-1]["result"] == "The file claude.txt is made.", done
            usage = events(recorder.requests[0])[0]["message"]["usage"]
        read = usage["cache_read_input_tokens"]
        made = usage["cache_creation_input_tokens"] + usage["input_tokens"]
        shares.append(read / (read + made))
    assert shares[0] < 0.1
    assert shares[1] > 0.85


async def test_thinking_that_the_client_does_not_see_returns_to_the_model(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await claude(recorder.url, workspace, "Please make claude.txt")
    assert recorder.requests[0].body["thinking"]["display"] == "omitted"
    assert b"I write the file first" not in recorder.requests[0].answer
    (_, second) = tap.of(done.events[-1]["session_id"])
    assert "I write the file first.\n</think>" in tap.text(second)


async def test_it_shows_its_context(recorder: Recorder, workspace: Workspace) -> None:
    done = await claude(recorder.url, workspace, "/context")
    assert done.status == 0, done
    assert "System tools" in done.events[-1]["result"]
    counted = recorder.requests_to("/v1/messages/count_tokens")
    assert len(counted) > 10
    assert {seen.status for seen in recorder.requests} == {200}
    assert all(json.loads(seen.answer)["input_tokens"] > 0 for seen in counted)


async def test_a_subagent_belongs_to_its_parent(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await claude(recorder.url, workspace, "Ask a helper", "--allowedTools", "Agent")
    result = done.events[-1]
    assert result["result"] == "There are none.", done
    session = result["session_id"]
    assert len(recorder.requests) == 4
    helpers = {work.session for work in tap.works if work.session} - {session}
    assert len(helpers) == 1
    helper = helpers.pop()
    assert_grows(tap.of(session))
    assert_grows(tap.of(helper))
    hints = [(d.hints.session, d.hints.parent_session) for d in tap.decisions]
    assert hints == [(session, None), (helper, session), (helper, session), (session, None)]


async def test_its_hooks_report_its_tools(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    page = (Path(__file__).parents[2] / "docs/requests.md").read_text()
    (example,) = (block for block in page.split("```json\n") if block.startswith('{\n  "hooks"'))
    folder = workspace.home / ".claude"
    folder.mkdir()
    hooks = example.partition("```")[0].replace("http://127.0.0.1:8000", recorder.url)
    (folder / "settings.json").write_text(hooks)
    done = await claude(recorder.url, workspace, "Ask a helper", "--allowedTools", "Agent")
    result = done.events[-1]
    assert result["result"] == "There are none.", done
    session = result["session_id"]
    (helper,) = {work.session for work in tap.works if work.session} - {session}
    assert [(event.session, event.tool, event.event) for event in tap.tools] == [
        (session, "Agent", "started"),
        (helper, "Bash", "started"),
        (helper, "Bash", "ended"),
        (session, "Agent", "ended"),
    ]
    calls = [event.call for event in tap.tools]
    assert (calls[0], calls[1]) == (calls[3], calls[2])
    asked = json.dumps(recorder.requests_to("/v1/messages")[-1].body)
    assert f'"tool_use_id": "{calls[0]}"' in asked
    last = await tap.outcome(tap.works[-1])
    assert [(o.agent, o.waits_for) for o in [*tap.outcomes[:3], last]] == [
        ("claude-code", ["tool", "Agent"]),
        ("claude-code/subagent", ["tool", "Bash", "echo"]),
        ("claude-code/subagent", ["end"]),
        ("claude-code", ["human"]),
    ]


async def test_tools_loaded_later_do_not_change_the_prompt_before_them(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await claude(recorder.url, workspace, "Load a tool", "--allowedTools", "CronList")
    result = done.events[-1]
    assert result["result"] == "Nothing is planned.", done
    assert result["num_turns"] == 3
    loaded = [tool["name"] for tool in recorder.requests[1].body["tools"]]
    assert "CronList" in loaded
    assert "CronList" not in [tool["name"] for tool in recorder.requests[0].body["tools"]]
    works = tap.of(result["session_id"])
    assert_grows(works)
    last = tap.text(works[-1])
    assert last.count('"name": "CronList"') == 2


async def test_compaction_reads_from_the_cache(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    made = await claude(recorder.url, workspace, "Please make claude.txt")
    session = made.events[-1]["session_id"]
    done = await claude(recorder.url, workspace, "/compact", "--resume", session)
    assert done.status == 0, done
    before, compaction = tap.works[-2:]
    assert shared(before, compaction) > len(before.tokens) // 4 - 8
    outcome = await tap.outcome(compaction)
    assert outcome.cached_tokens > len(before.tokens) // 4 - 32
    done = await claude(recorder.url, workspace, "What next?", "--resume", session)
    assert done.events[-1]["result"] == "Nothing more.", done
    assert len(tap.works[-1].tokens) < len(tap.works[-2].tokens)


@pytest.mark.parametrize("status", [200, 404])
async def test_it_falls_back_to_responses_without_streaming(
    recorder: Recorder, workspace: Workspace, status: int
) -> None:
    broken = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"x"}}\n\n'

    def break_streams(path: str, body: dict[str, Any]) -> web.Response | None:
        if not body.get("stream"):
            return None
        kind = "text/event-stream" if status == 200 else "application/json"
        return web.Response(status=status, body=broken, content_type=kind)

    recorder.intervene = break_streams
    done = await claude(recorder.url, workspace, "Please make claude.txt")
    assert done.status == 0, done
    assert done.events[-1]["result"] == "The file claude.txt is made."
    whole = [json.loads(seen.answer) for seen in recorder.requests if not seen.body.get("stream")]
    assert [answer["stop_reason"] for answer in whole] == ["tool_use", "end_turn"]
    assert whole[1]["usage"]["cache_read_input_tokens"] > 0


async def test_it_waits_after_a_429(limited: LimitedMesh, workspace: Workspace) -> None:
    async with limited.at_limit() as recorder:
        done = await claude(recorder.url, workspace, "Please make claude.txt")
    assert done.events[-1]["result"] == "The file claude.txt is made.", done
    statuses = [seen.status for seen in recorder.requests]
    assert statuses[0] == 429
    assert statuses[-2:] == [200, 200]
    error = json.loads(recorder.requests[0].answer)
    assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")
    assert error["request_id"]


async def test_it_requests_fewer_tokens_in_a_short_context(small: Up, workspace: Workspace) -> None:
    async with Recorder(small.url).listening() as recorder:
        done = await claude(recorder.url, workspace, "Please make claude.txt")
    assert done.events[-1]["result"] == "The file claude.txt is made.", done
    assert [seen.status for seen in recorder.requests][:2] == [400, 200]
    assert recorder.requests[1].body["max_tokens"] < recorder.requests[0].body["max_tokens"]


async def test_it_reports_that_a_prompt_is_too_long(small: Up, workspace: Workspace) -> None:
    done = await claude(small.url, workspace, "Read this: " + "some words of it " * 6000)
    result = done.events[-1]
    assert result["terminal_reason"] == "prompt_too_long", done
    assert f"(limit {SMALL})" in result["result"]


def events(seen: RecordedRequest) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    lines = seen.answer.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
