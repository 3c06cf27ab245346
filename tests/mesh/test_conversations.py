"""Stored conversations on a real mesh, by OpenAI's own client."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "kvmesh-demo"
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
HI: Any = {"role": "user", "content": "Hi, I am Ada."}
HELLO: Any = {"role": "assistant", "content": "Hello."}
QUESTION: Any = {"role": "user", "content": "What is my name?"}


@pytest.fixture(scope="module")
def mesh(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("conversations")
    mesh = Mesh(nats_server.url, folder)
    keys = folder / "keys.toml"
    with keys.open("a") as file:
        for secret in ("a", "b"):
            digest = hashlib.sha256(secret.encode()).hexdigest()
            file.write(f'[[key]]\nname = "{secret}"\nsha256 = "{digest}"\ntenant = "{secret}"\n')
    mesh.env |= {"KVMESH_FRONTEND_KEYS_FILE": str(keys), "KVMESH_MOCK_SPEEDUP": "50"}
    try:
        mesh.start_all(workers=1)
        asyncio.run(mesh.ready())
        yield mesh
    finally:
        mesh.stop()


def client_of(mesh: Mesh, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=key, max_retries=0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(mesh, "a") as client:
        yield client


def texts(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items]


async def test_a_conversation_and_its_items_are_kept_changed_and_deleted(
    mesh: Mesh, client: AsyncOpenAI
) -> None:
    made = await client.conversations.create(items=[HI], metadata={"topic": "names"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "names"})
    assert await client.conversations.retrieve(made.id) == made
    changed = await client.conversations.update(made.id, metadata={"topic": "other"})
    assert changed.metadata == {"topic": "other"}
    assert changed.created_at == made.created_at
    added = await client.conversations.items.create(made.id, items=[HELLO, QUESTION])
    assert [item.type for item in added.data] == ["message", "message"]
    listed: Any = await client.conversations.items.list(made.id, order="asc", limit=2)
    assert texts(listed.data) == ["Hi, I am Ada.", "Hello."]
    assert listed.has_more
    newest: Any = await client.conversations.items.list(made.id, limit=1)
    assert newest.data == added.data[1:]
    first = listed.data[0].id
    one: Any = await client.conversations.items.retrieve(first, conversation_id=made.id)
    assert texts([one]) == ["Hi, I am Ada."]
    assert (await client.conversations.items.delete(first, conversation_id=made.id)).id == made.id
    with pytest.raises(NotFoundError, match=first):
        await client.conversations.items.retrieve(first, conversation_id=made.id)
    async with client_of(mesh, "b") as other:
        with pytest.raises(NotFoundError):
            await other.conversations.retrieve(made.id)
        with pytest.raises(NotFoundError):
            await other.responses.create(**GREEDY, input="x", conversation=made.id)
    deleted = await client.conversations.delete(made.id)
    assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")
    with pytest.raises(NotFoundError, match="Conversation with id"):
        await client.conversations.retrieve(made.id)


async def answered(client: AsyncOpenAI, way: str, **fields: Any) -> Any:
    """The finished response, asked for in one of the ways."""
    if way == "websocket":
        async with client.responses.connect() as connection, asyncio.timeout(PATIENCE_S):
            created: Any = {"type": "response.create", **GREEDY, **fields}
            await connection.send(created)
            while True:
                event: Any = await connection.recv()
                assert event.type not in ("error", "response.failed"), event
                if event.type in ("response.completed", "response.incomplete"):
                    return event.response
    more = {"background": True} if way == "background" else {}
    if way == "whole":
        return await client.responses.create(**GREEDY, **fields)
    create: Any = client.responses.create
    async with await create(**GREEDY, **fields, **more, stream=True) as stream:
        async for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize("way", ["whole", "stream", "websocket", "background"])
async def test_a_response_continues_a_conversation_and_is_added_to_it(
    client: AsyncOpenAI, way: str
) -> None:
    made = await client.conversations.create(items=[HI, HELLO])
    first = await answered(client, way, input=[QUESTION], conversation=made.id)
    assert first.conversation.id == made.id
    same = await client.responses.create(**GREEDY, input=[HI, HELLO, QUESTION])
    assert same.usage is not None
    assert same.usage.input_tokens == first.usage.input_tokens
    assert texts(same.output) == texts(first.output)
    listed: Any = await client.conversations.items.list(made.id, order="asc")
    assert [item.role for item in listed.data] == ["user", "assistant", "user", "assistant"]
    assert listed.data[-1].id == first.output[0].id
    second = await answered(client, way, input="And yours?", conversation={"id": made.id})
    assert second.usage.input_tokens > first.usage.total_tokens
    count = client.responses.input_tokens.count
    counted = await count(model=MODEL, input="x", conversation=made.id)
    assert counted.input_tokens > second.usage.total_tokens
    with pytest.raises(BadRequestError, match=made.id):
        await client.responses.create(**GREEDY, input="x", previous_response_id=second.id)


async def test_whatever_is_added_at_the_same_time_is_kept(client: AsyncOpenAI) -> None:
    made = await client.conversations.create()
    items = [[{"role": "user", "content": f"number {n}"}] for n in range(24)]
    add: Any = client.conversations.items.create
    await asyncio.gather(*(add(made.id, items=each) for each in items))
    listed: Any = await client.conversations.items.list(made.id, limit=100)
    assert sorted(texts(listed.data)) == sorted(f"number {n}" for n in range(24))


async def test_an_item_is_in_a_conversation_once(client: AsyncOpenAI) -> None:
    twice: Any = [{**HI, "id": "msg_own"}] * 2
    made = await client.conversations.create(items=twice)
    await client.conversations.items.create(made.id, items=[*twice, HI])
    listed: Any = await client.conversations.items.list(made.id)
    assert [item.id for item in listed.data][1:] == ["msg_own"]


async def test_items_of_tools_that_are_unknown_here_are_kept(client: AsyncOpenAI) -> None:
    odd: Any = {"type": "future_call", "id": 7, "call_id": {"a": 1}, "arguments": "x"}
    made = await client.conversations.create(items=[odd, HI])
    listed: Any = await client.conversations.items.list(made.id, order="asc")
    assert [item.type for item in listed.data] == ["future_call", "message"]
    response = await client.responses.create(**GREEDY, input="And?", conversation=made.id)
    assert response.output


async def test_what_cannot_be_served_is_named(client: AsyncOpenAI) -> None:
    made = await client.conversations.create()
    both: Any = {"conversation": made.id, "previous_response_id": "resp_1"}
    refused: list[tuple[Any, str, str]] = [
        (both, "previous_response_id", "mutually_exclusive_parameters"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "invalid_value"),
    ]
    for fields, param, code in refused:
        with pytest.raises(BadRequestError) as raised:
            await client.responses.create(**GREEDY, input="x", **fields)
        assert (raised.value.param, raised.value.code) == (param, code)
    with pytest.raises(NotFoundError) as missing:
        await client.responses.create(**GREEDY, input="x", conversation="conv_none")
    assert missing.value.param == "conversation"
    many: Any = [HI] * 21
    with pytest.raises(BadRequestError) as raised:
        await client.conversations.items.create(made.id, items=many)
    assert raised.value.param == "items"
    wrong: Any = [{"type": "message", "role": "ghost", "content": "x"}]
    with pytest.raises(BadRequestError) as raised:
        await client.conversations.create(items=wrong)
    assert raised.value.param == "items[0].role"
    with pytest.raises(BadRequestError):
        await client.conversations.update(made.id, metadata={"key": "x" * 513})
