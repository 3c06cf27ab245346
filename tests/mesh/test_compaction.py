"""Compaction: the model summarizes a conversation, and goes on from there."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
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
            delta, block = event["delta"], content[event["index"]]
            if delta["type"] == "compaction_delta":
                block |= {k: v for k, v in delta.items() if k != "type"}
            else:
                block["text"] += delta["text"]
    last = next(each for each in found if each["type"] == "message_delta")
    return {**start, "content": content, **last["delta"], "usage": last["usage"]}


@streamed
async def test_a_long_conversation_is_summarized_and_goes_on(client: Client, stream: bool) -> None:
    answer = await answered(client, body(200), stream)
    compaction, text = answer["content"]
    assert (compaction["type"], compaction["content"]) == ("compaction", SUMMARY)
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
    assert [block["content"] for block in answer["content"]] == ["short"]
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


# --- the Responses API, by OpenAI's client ------------------------------------------------------

HISTORY: Any = [
    {"role": "developer", "content": "You count files."},
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "There are 3 files."},
    {"role": "user", "content": "What now?"},
]
MANAGED: Any = [{"type": "compaction", "compact_threshold": 200}]
Ask = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture(loop_scope="module")
async def openai(client: Client) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{client.url}/v1", api_key="n", max_retries=0) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module", params=["whole", "stream", "websocket"])
async def ask(openai: AsyncOpenAI, request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    """Asks for a response in one of the ways."""

    async def whole(**fields: Any) -> Any:
        return await openai.responses.create(model=MODEL, **fields)

    async def by_stream(**fields: Any) -> Any:
        async with openai.responses.stream(model=MODEL, **fields) as stream:
            added = [e.item.id async for e in stream if e.type == "response.output_item.done"]
            response: Any = await stream.get_final_response()
        assert added == [item.id for item in response.output]
        return response

    if request.param != "websocket":
        yield whole if request.param == "whole" else by_stream
        return
    async with openai.responses.connect() as connection:

        async def by_socket(**fields: Any) -> Any:
            created: Any = {"type": "response.create", "model": MODEL, **fields}
            await connection.send(created)
            while True:
                event: Any = await connection.recv()
                assert event.type != "error", event
                if event.type == "response.completed":
                    return event.response

        yield by_socket


def words(response: Any) -> list[str]:
    """The types of the items, and their texts."""
    return [
        item.content[0].text if item.type == "message" else item.type for item in response.output
    ]


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_begins_with_a_summary_that_all_ways_of_going_on_know(
    openai: AsyncOpenAI, ask: Ask, store: bool
) -> None:
    first = await ask(input=HISTORY, context_management=MANAGED, store=store)
    assert words(first) == ["compaction", "I go on from the summary."]
    assert first.usage.input_tokens < 200
    output = [item.to_dict() for item in first.output]
    more = [{"role": "user", "content": "And then?"}]
    ways = [{"input": [*HISTORY, *output, *more]}, {"input": [*output, *more]}]
    if store:
        ways.append({"input": more, "previous_response_id": first.id})
    asked = [await ask(**way, store=store) for way in ways]
    if not store and ask.__name__ == "by_socket":
        again = await ask(input=HISTORY, context_management=MANAGED, store=False)
        asked.append(await ask(input=more, previous_response_id=again.id, store=False))
    assert {words(response)[0] for response in asked} == {"I go on from the summary."}
    assert len({response.usage.input_tokens for response in asked}) == 1
    assert asked[0].usage.input_tokens > first.usage.total_tokens


async def test_an_item_asks_for_a_summary_alone(ask: Ask) -> None:
    asked: Any = [*HISTORY, {"type": "compaction_trigger"}]
    response = await ask(input=asked, store=False)
    assert words(response) == ["compaction"]
    assert response.usage.input_tokens > 200


async def test_nothing_cannot_be_compacted(openai: AsyncOpenAI) -> None:
    empty: Any = [{"type": "message", "role": "user", "content": []}]
    asked: Any = [*empty, {"type": "compaction_trigger"}]
    for refused in (
        openai.responses.compact(model=MODEL, input=empty),
        openai.responses.create(model=MODEL, input=asked),
        openai.responses.create(model=MODEL, input=asked, stream=True),
    ):
        with pytest.raises(BadRequestError) as raised:
            await refused
        assert raised.value.param == "input"


@pytest.mark.parametrize("stored", [False, True])
async def test_a_conversation_is_compacted_on_request(openai: AsyncOpenAI, stored: bool) -> None:
    sent: Any = {"input": HISTORY}
    if stored:
        first = await openai.responses.create(model=MODEL, input=HISTORY)
        sent = {"previous_response_id": first.id}
    compacted = await openai.responses.compact(model=MODEL, **sent)
    assert compacted.object == "response.compaction"
    # the client's own type of these items has no texts of users
    items: Any = [item.to_dict(warnings=False) for item in compacted.output]
    assert [item.get("role", item["type"]) for item in items] == ["user", "user", "compaction"]
    assert compacted.usage.input_tokens > 200
    more = [*items, {"role": "user", "content": "And then?"}]
    following = await openai.responses.create(model=MODEL, input=more)
    assert words(following) == ["I go on from the summary."]
    assert following.usage is not None
    assert following.usage.input_tokens < 100


async def test_a_compacted_conversation_stays_one(client: Client, openai: AsyncOpenAI) -> None:
    """Engines find by its key what it has left: they evict that first, and drop it next."""
    shared: Any = {"prompt_cache_key": "one", "context_management": MANAGED, "store": False}
    system = {"role": "developer", "content": "You count files. " * 40}
    history: Any = [system, *HISTORY[1:]]
    before = await openai.responses.create(
        model=MODEL, input=history[:2], **shared | {"context_management": None}
    )
    first = await openai.responses.create(model=MODEL, input=history, **shared)
    details = first.usage and first.usage.input_tokens_details
    assert details is not None
    assert details.cached_tokens >= 160  # the system text
    output: Any = [item.to_dict() for item in first.output]
    for text in ("And then?", "What else?"):
        output = [*output, {"role": "user", "content": text}]
        following = await openai.responses.create(model=MODEL, input=output, **shared)
        output += [item.to_dict() for item in following.output]
    old = await openai.responses.create(
        model=MODEL, input=history[:2], **shared | {"context_management": None}
    )
    assert old.usage is not None
    assert before.usage is not None
    assert old.usage.input_tokens_details.cached_tokens < before.usage.input_tokens - 100
