"""opencode, headless, on each of the three APIs that it speaks."""

import json
from typing import Any

import pytest
from support.harness import KEY, ClientResult, LimitedMesh, Recorder, Workspace
from support.tap import Tap, assert_grows

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
PATHS = {
    "@ai-sdk/openai-compatible": "/v1/chat/completions",
    "@ai-sdk/openai": "/v1/responses",
    "@ai-sdk/anthropic": "/v1/messages",
}
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


async def opencode(
    url: str, workspace: Workspace, prompt: str, package: str = "@ai-sdk/openai-compatible"
) -> ClientResult:
    configuration = json.dumps(configure(url, package))
    (workspace.repository / "opencode.json").write_text(configuration)
    return await workspace.run("opencode", "run", "--format", "json", prompt, env=QUIET)


def configure(url: str, package: str, context: int = 262144) -> dict[str, Any]:
    limit = {"context": context, "output": 16384}
    return {
        "model": "kvmesh/kvmesh-demo",
        "small_model": "kvmesh/kvmesh-demo",
        "share": "disabled",
        "autoupdate": False,
        "provider": {
            "kvmesh": {
                "npm": package,
                "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
                "models": {"kvmesh-demo": {"limit": limit}},
            }
        },
    }


def texts(done: ClientResult) -> list[str]:
    """The client's texts; asserts that it ended without an error."""
    assert done.status == 0, done
    assert not [event for event in done.events if event["type"] == "error"], done
    return [event["part"]["text"] for event in done.events if event["type"] == "text"]


@pytest.mark.parametrize("package", PATHS)
async def test_it_uses_a_tool_and_answers(
    recorder: Recorder, tap: Tap, workspace: Workspace, package: str
) -> None:
    done = await opencode(recorder.url, workspace, "Please make opencode.txt", package)
    assert texts(done) == ["I make the file.", "The file opencode.txt is made."]
    assert (workspace.repository / "opencode.txt").read_text() == "made-by-opencode\n"
    assert {(seen.path, seen.status) for seen in recorder.requests} == {(PATHS[package], 200)}
    works = tap.of(done.events[0]["sessionID"])
    titles = [work for work in works if "You are a title generator" in tap.text(work)]
    turns = [work for work in works if work not in titles]
    assert_grows(turns)
    outcomes = [await tap.outcome(work) for work in (*turns, *titles)]
    assert {outcome.agent for outcome in outcomes} == {"opencode"}
    assert [outcome.waits_for for outcome in outcomes] == [
        ["tool", "bash", "cat"],
        ["human"],
        *[["human", "no_tools"]] * len(titles),
    ]
    steps = [event["part"]["tokens"] for event in done.events if event["type"] == "step_finish"]
    assert steps[-1]["cache"]["read"] > steps[-1]["input"]


async def test_a_subagent_belongs_to_its_parent(
    recorder: Recorder, tap: Tap, workspace: Workspace
) -> None:
    done = await opencode(recorder.url, workspace, "Delegate it")
    assert texts(done) == ["It is delegated."]
    parent = done.events[0]["sessionID"]
    hints = {(d.hints.session, d.hints.parent_session) for d in tap.decisions}
    assert len(hints) == 2
    assert (parent, None) in hints
    assert parent in {above for _, above in hints}


async def test_it_waits_after_a_429(limited: LimitedMesh, workspace: Workspace) -> None:
    async with limited.at_limit() as recorder:
        done = await opencode(recorder.url, workspace, "Please make opencode.txt")
    assert texts(done)[-1] == "The file opencode.txt is made."
    assert 429 in [seen.status for seen in recorder.requests]
