"""Compaction of the Messages API: the model summarizes a conversation, and goes on from there."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.apis import streamed
from support.frontend import MODEL, Client, client_session, events
from support.mesh import Mesh
from support.nats import NatsServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/messages"
SUMMARY = "The user counts files; there are 3 so far."
SCRIPT = [
    {"match": "Summarize the conversation", "text": f"Sure.\n<summary>\n{SUMMARY}\n</summary>"},
    {"match": "SHORTLY", "text": "<summary>short</summary>"},
    {"match": "as a summary", "text": "I go on from the summary."},
    {"match": "What now", "text": "I go on without one."},
]
LONG = "Look at the file once more, please. " * 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Client]:
    folder = tmp_path_factory.mktemp("compaction")
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(entry) + "\n" for entry in SCRIPT))
    env = {"KVMESH_MOCK_SPEEDUP": "50", "KVMESH_MOCK_SCRIPT": str(script)}
    mesh = Mesh(nats_server.url, folder, env)
    mesh.start_all(workers=1)
    await mesh.ready()
    async with client_session() as session:
        yield Client(mesh.url, session)
    mesh.stop()


def body(trigger: int, **edit: Any) -> dict[str, Any]:
    compact = {
        "type": "compact_20260112",
        "trigger": {"type": "input_tokens", "value": trigger},
        **edit,
    }
    return {
        "model": MODEL,
        "max_tokens": 64,
        "messages": [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": "There are 3 files."},
            {"role": "user", "content": "What now?"},
        ],
        "context_management": {"edits": [compact]},
    }


async def answered(client: Client, sent: dict[str, Any], stream: bool) -> Any:
    """The message; of a stream put together from its events."""
    if not stream:
        status, answer = await client.post(PATH, sent)
        assert status == 200, answer
        return answer
    found = await events(await client.stream(PATH, {**sent, "stream": True}))
    start = next(each["message"] for each in found if each["type"] == "message_start")
    content: list[Any] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        if event["type"] == "content_block_delta":
            field = "content" if "content" in event["delta"] else "text"
            content[event["index"]][field] += event["delta"][field]
    last = next(each for each in found if each["type"] == "message_delta")
    return {**start, "content": content, **last["delta"], "usage": last["usage"]}


@streamed
async def test_a_long_conversation_is_summarized_and_goes_on(client: Client, stream: bool) -> None:
    answer = await answered(client, body(200), stream)
    compaction, text = answer["content"]
    assert compaction == {"type": "compaction", "content": SUMMARY}
    assert text["text"] == "I go on from the summary."
    assert answer["stop_reason"] == "end_turn"
    first, second = answer["usage"]["iterations"]
    assert (first["type"], second["type"]) == ("compaction", "message")
    assert total(first) > 200 > total(second) == total(answer["usage"])


def total(usage: dict[str, int]) -> int:
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] for name in names)


@streamed
async def test_an_answer_may_end_with_its_summary(client: Client, stream: bool) -> None:
    edit = {"pause_after_compaction": True, "instructions": "Write it SHORTLY."}
    answer = await answered(client, body(200, **edit), stream)
    assert answer["content"] == [{"type": "compaction", "content": "short"}]
    assert answer["stop_reason"] == "compaction"
    assert [each["type"] for each in answer["usage"]["iterations"]] == ["compaction"]


async def test_a_returned_summary_stands_for_all_before_it(client: Client) -> None:
    sent = body(200)
    first = await answered(client, sent, False)
    history = [*sent["messages"], {"role": "assistant", "content": first["content"]}]
    again = {**sent, "messages": [*history, {"role": "user", "content": "And then?"}]}
    short = {**again, "messages": again["messages"][-2:]}
    counted = [
        (await client.post(f"{PATH}/count_tokens", {k: v for k, v in each.items() if k in KEPT}))[1]
        for each in (again, short)
    ]
    assert counted[0]["input_tokens"] == counted[1]["input_tokens"] < 100
    second = await answered(client, again, False)
    assert [block["type"] for block in second["content"]] == ["text"]
    assert total(second["usage"]) == counted[0]["input_tokens"]


KEPT = ("model", "messages")


@streamed
async def test_a_short_conversation_stays_as_it_is(client: Client, stream: bool) -> None:
    answer = await answered(client, body(100_000), stream)
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert "iterations" not in answer["usage"]
    assert answer["context_management" if not stream else "stop_reason"]
