"""Files and batches through the SDKs of both vendors, on two frontends of one mesh."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx
import pytest
import pytest_asyncio
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types import Batch
from support.mesh import Mesh, is_healthy
from support.nats import NatsServer, free_port
from support.wait import eventually

if TYPE_CHECKING:  # each process of the mesh tests reads this file
    from anthropic import AsyncAnthropic

MODEL = "kvmesh-demo"
CHAT: Final = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
FORM = {"content-type": "multipart/form-data; boundary=x"}
MAX_FILE = 1 << 20
LONG = 8_000  # tokens, which take longer than a test
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Stage(NamedTuple):
    mesh: Mesh
    urls: tuple[str, str]

    def openai(self, frontend: int = 0, key: str = "n") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.urls[frontend]}/v1", api_key=key, max_retries=0)

    def anthropic(self, frontend: int = 0, key: str = "n") -> "AsyncAnthropic":
        from anthropic import AsyncAnthropic

        return AsyncAnthropic(base_url=self.urls[frontend], api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def running(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Mesh, str]]:
    folder = tmp_path_factory.mktemp("batches")
    mesh = Mesh(nats_server.url, folder)
    mesh.env |= {
        "KVMESH_FRONTEND_KEYS_FILE": str(keys_file(folder)),
        "KVMESH_FRONTEND_FILES_BYTES": str(64 << 20),
        "KVMESH_FRONTEND_MAX_FILE_BYTES": str(MAX_FILE),
        "KVMESH_FRONTEND_MAX_BODY_BYTES": str(MAX_FILE // 2),
        "KVMESH_FRONTEND_TENANT_BATCHES": "3",
        "KVMESH_FRONTEND_DRAIN_TIMEOUT_S": "1",
        "KVMESH_STREAMS_LEASE_S": "3",
        "KVMESH_MOCK_SPEEDUP": "4",
        "KVMESH_MOCK_OUTPUT_TOKENS": str(10 * LONG),
    }
    other = free_port()
    try:
        mesh.start_all()
        mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(other))
        asyncio.run(mesh.ready())
        yield mesh, f"http://127.0.0.1:{other}"
    finally:
        mesh.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(running: tuple[Mesh, str]) -> AsyncIterator[Stage]:
    """Both frontends, once they are ready."""
    mesh, other = running
    if "frontend-0" not in mesh.processes:
        mesh.restart("frontend-0")
    await eventually(lambda: is_healthy(other) and is_healthy(mesh.url))
    yield Stage(mesh, (mesh.url, other))


def keys_file(folder: Path) -> Path:
    """The key `n` of one tenant, `slow` of it with few requests a minute, `m` and `o` of others."""
    path = folder / "keys.toml"
    for name, tenant, more in (
        ("n", "t", ""),
        ("slow", "t", "requests_per_minute = 60"),
        ("m", "u", ""),
        ("o", "v", ""),
    ):
        digest = hashlib.sha256(name.encode()).hexdigest()
        with path.open("a") as file:
            text = f'[[key]]\nname = "{name}"\nsha256 = "{digest}"\ntenant = "{tenant}"\n{more}\n'
            file.write(text)
    return path


def request(number: int, tokens: int = 5, **changes: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Question {number} of a batch"}
    body = {"model": MODEL, "messages": [message], "max_tokens": tokens}
    return {**body, **changes}


def lines(count: int, tokens: int = 5, **changes: Any) -> bytes:
    return b"".join(line(f"r-{n}", request(n, tokens, **changes)) for n in range(count))


def line(name: str, body: dict[str, Any], url: str = CHAT) -> bytes:
    entry = {"custom_id": name, "method": "POST", "url": url, "body": body}
    return json.dumps(entry).encode() + b"\n"


async def begin(client: AsyncOpenAI, data: bytes, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def ended(client: AsyncOpenAI, batch_id: str) -> Batch:
    found: list[Batch] = []

    async def over() -> bool:
        found[:] = [await client.batches.retrieve(batch_id)]
        return found[0].status in FINAL

    await eventually(over, what=f"{batch_id} ends")
    return found[0]


async def results(client: AsyncOpenAI, name: str | None) -> dict[str, Any]:
    """The lines of a file by their custom ids, none of which is there twice."""
    assert name is not None
    text = (await client.files.content(name)).text
    entries = [json.loads(each) for each in text.splitlines()]
    found = {entry["custom_id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


async def test_a_batch_of_chats_with_a_wrong_one_among_them(stage: Stage) -> None:
    async with stage.openai() as client:
        data = lines(20) + b"\n" + line("wrong", request(0, temperature=9))
        data += line("unknown", request(0, model="nobody")) + line("s", request(0, stream=True))
        begun = await begin(client, data)
        assert begun.object == "batch"
        assert begun.metadata == {"a": "b"}
        assert begun.expires_at == begun.created_at + 86400
        batch = await ended(client, begun.id)
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (23, 20, 3)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 20 * 5
        good = await results(client, batch.output_file_id)
        assert good.keys() == {f"r-{n}" for n in range(20)}
        for entry in good.values():
            assert entry["response"]["status_code"] == 200
            assert entry["response"]["body"]["usage"]["completion_tokens"] == 5
        bad = await results(client, batch.error_file_id)
        statuses = {name: entry["response"]["status_code"] for name, entry in bad.items()}
        assert statuses == {"wrong": 400, "unknown": 404, "s": 400}
        assert bad["wrong"]["response"]["body"]["error"]["param"] == "temperature"
        listed = [each.id async for each in client.batches.list(limit=1)]
        assert listed[0] == batch.id
        files = {each.id: each async for each in client.files.list()}
        assert files[batch.input_file_id].filename == "in.jsonl"
        assert files[batch.output_file_id or ""].purpose == "batch_output"
        assert (await client.files.content(batch.input_file_id)).content == data
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(NotFoundError):
            await client.files.retrieve(batch.input_file_id)
        with pytest.raises(BadRequestError):
            await client.batches.cancel(batch.id)
    async with stage.openai(1, "m") as stranger:
        for call in (stranger.batches.retrieve, stranger.batches.cancel):
            with pytest.raises(NotFoundError):
                await call(batch.id)
        with pytest.raises(NotFoundError):
            await stranger.files.content(batch.output_file_id or "")
        assert [each async for each in stranger.files.list()] == []


@pytest.mark.parametrize("endpoint", ["/v1/responses", "/v1/completions"])
async def test_a_batch_of_another_endpoint(stage: Stage, endpoint: str) -> None:
    name = "input" if endpoint == "/v1/responses" else "prompt"
    limit = "max_output_tokens" if name == "input" else "max_tokens"
    async with stage.openai() as client:
        data = line("one", {"model": MODEL, name: "Say something.", limit: 5}, endpoint)
        batch = await ended(client, (await begin(client, data, endpoint)).id)
        body = (await results(client, batch.output_file_id))["one"]["response"]["body"]
        assert body["object"] == ("response" if name == "input" else "text_completion")
        if name == "input":
            assert (await client.responses.retrieve(body["id"])).id == body["id"]


async def test_a_file_that_is_not_a_batch(stage: Stage) -> None:
    async with stage.openai() as client:
        data = line("a", {}) + b"{}\n" + line("a", {}) + line("b", {}, "/v1/completions")
        batch = await ended(client, (await begin(client, data)).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        found = [(each.line, each.code) for each in batch.errors.data or ()]
        codes = ["invalid_json_line", "duplicate_custom_id", "invalid_url"]
        assert found == list(zip((2, 3, 4), codes, strict=True))
        with pytest.raises(NotFoundError):
            await begin_with(client, "file-nothing")
        with pytest.raises(BadRequestError) as wrong:
            await begin(client, data, "/v1/embeddings")
        assert wrong.value.param == "endpoint"
        with pytest.raises(BadRequestError):
            await client.files.create(file=("a.txt", b"x"), purpose="vision")
        with pytest.raises(APIStatusError) as large:
            await client.files.create(file=("a", bytes(MAX_FILE + 1)), purpose="batch")
        assert large.value.status_code == 413
        async with httpx.AsyncClient(headers={"x-api-key": "n"}) as http:
            for headers, body in (
                (FORM, b"nothing"),
                (FORM, form(b'name="file"; filename="' + b"a" * (1 << 17) + b'"')),
                (FORM, form(b'name="\xff"', b"x" * (1 << 13))),
                (FORM, form(b'name="file"\r\nContent-Type: multipart/mixed; boundary=y')),
                ({"content-type": "application/json"}, b"{}"),
            ):
                url = f"{stage.mesh.url}/v1/files"
                answer = await http.post(url, content=body, headers=headers)
                assert answer.status_code == 400, answer.text


def form(file: bytes, data: bytes = b"1\n") -> bytes:
    """A form with a purpose, and a file of such a disposition."""
    begin = b"--x\r\nContent-Disposition: form-data; "
    parts = b'name="purpose"\r\n\r\nbatch', file + b"\r\n\r\n" + data
    return b"".join(begin + part + b"\r\n" for part in parts) + b"--x--\r\n"


async def test_a_request_is_no_larger_than_one_alone(stage: Stage) -> None:
    async with stage.openai() as client:
        data = line("large", request(0, user="x" * (MAX_FILE // 2))) + line("small", request(1))
        batch = await ended(client, (await begin(client, data)).id)
        assert (await results(client, batch.output_file_id)).keys() == {"small"}
        bad = await results(client, batch.error_file_id)
        assert bad["large"]["response"]["status_code"] == 413


async def test_a_form_arrives_byte_by_byte(stage: Stage) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for byte in form(b'name="file"; filename="a\xff"'):
            yield bytes([byte])
            await asyncio.sleep(0)

    async with httpx.AsyncClient(headers={"x-api-key": "n", **FORM}) as http:
        answer = await http.post(f"{stage.mesh.url}/v1/files", content=slowly())
    assert answer.status_code == 200, answer.text
    assert (answer.json()["filename"], answer.json()["bytes"]) == ("a?", 2)


async def test_a_batch_that_is_no_batch_is_cancelled(stage: Stage) -> None:
    async with stage.openai(0) as client:
        file = await client.files.create(file=("a", b"1\n" * 50_000), purpose="batch")
        begun = await begin_with(client, file.id)
        with suppress(BadRequestError):  # it has ended
            await client.batches.cancel(begun.id)
        assert (await ended(client, begun.id)).status == "failed"


async def begin_with(client: AsyncOpenAI, file: str) -> Batch:
    return await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")


async def test_a_batch_goes_on_once_its_frontend_was_killed(stage: Stage) -> None:
    count = 400
    async with stage.openai(0) as one, stage.openai(1) as two:
        begun = await begin(one, lines(count, 100))

        async def half() -> bool:
            counts = (await two.batches.retrieve(begun.id)).request_counts
            return counts is not None and counts.completed > count // 10

        await eventually(half, what="a part is done")
        stage.mesh.kill("frontend-0")
        batch = await ended(two, begun.id)
        assert batch.status == "completed", batch
        good = await results(two, batch.output_file_id)
        assert good.keys() == {f"r-{n}" for n in range(count)}
        assert batch.request_counts is not None
        assert batch.request_counts.completed == count
        assert batch.usage is not None
        assert batch.usage.output_tokens == 100 * count


async def test_a_batch_is_cancelled_at_another_frontend(stage: Stage) -> None:
    async with stage.openai(0) as one, stage.openai(1) as two:
        begun = await begin(one, lines(30) + line("long", request(0, LONG)))

        async def most() -> bool:
            counts = (await two.batches.retrieve(begun.id)).request_counts
            return counts is not None and counts.completed == 30

        await eventually(most, what="all but one are done")
        with pytest.raises(BadRequestError) as used:
            await two.files.delete(begun.input_file_id)
        assert used.value.code == "file_in_use"
        assert (await two.batches.cancel(begun.id)).status == "cancelling"
        batch = await ended(one, begun.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        assert len(await results(one, batch.output_file_id)) == 30
        bad = await results(one, batch.error_file_id)
        assert bad["long"]["error"]["code"] == "batch_cancelled"
        await eventually(lambda: stage.mesh.metric("kvmesh_frontend_active_requests") == 0)


async def test_requests_wait_for_the_limits_of_their_key(stage: Stage) -> None:
    async with stage.openai(1, "slow") as slow, stage.openai(0) as client:
        batch = await ended(client, (await begin(slow, lines(60, 1))).id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 60


async def test_a_tenant_has_so_many_batches(stage: Stage) -> None:
    """Exactly so many of those that are created at the same time, on two frontends."""
    async with stage.openai(0, "m") as client, stage.openai(1, "m") as other:
        data = line("long", request(0, LONG))
        made = await asyncio.gather(
            *(begin((client, other)[n % 2], data) for n in range(12)), return_exceptions=True
        )
        begun = [each for each in made if isinstance(each, Batch)]
        assert len(begun) == 3
        refused = [each for each in made if isinstance(each, APIStatusError)]
        assert [each.status_code for each in refused] == [429] * 9
        listed = [each.id async for each in client.batches.list()]
        assert set(listed) == {each.id for each in begun}
        for each in begun:
            await client.batches.cancel(each.id)
        for each in begun:
            assert (await ended(client, each.id)).status == "cancelled"


async def test_a_tenant_has_so_many_bytes(stage: Stage) -> None:
    """A quarter of the store, also if files arrive at the same time at two frontends."""
    async with stage.openai(0, "o") as client, stage.openai(1, "o") as other:
        uploads = (
            (client, other)[n % 2].files.create(file=("in", bytes(MAX_FILE)), purpose="batch")
            for n in range(20)
        )
        made = await asyncio.gather(*uploads, return_exceptions=True)
        refused = [each.status_code for each in made if isinstance(each, APIStatusError)]
        assert refused == [413] * 4
        assert len([each async for each in client.files.list()]) == 16


async def test_batches_of_messages(stage: Stage) -> None:
    import anthropic

    async with stage.anthropic(0) as one, stage.anthropic(1) as two:
        given: Any = [{"custom_id": f"m-{n}", "params": request(n)} for n in range(5)]
        given.append({"custom_id": "wrong", "params": request(0, model="nobody")})
        begun = await one.messages.batches.create(requests=given)
        assert begun.processing_status == "in_progress"
        assert begun.request_counts.processing == 6

        async def over() -> bool:
            return (await two.messages.batches.retrieve(begun.id)).processing_status == "ended"

        await eventually(over)
        batch = await two.messages.batches.retrieve(begun.id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (5, 1, 0)
        found = {
            each.custom_id: each.result
            async for each in await two.messages.batches.results(begun.id)
        }
        assert len(found) == 6
        good, bad = found["m-0"], found["wrong"]
        assert good.type == "succeeded"
        assert good.message.usage.output_tokens == 5
        assert bad.type == "errored"
        assert bad.error.error.type == "not_found_error"
        assert [each.id async for each in two.messages.batches.list(limit=1)] == [begun.id]
        deleted = await two.messages.batches.delete(begun.id)
        assert deleted.type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await one.messages.batches.retrieve(begun.id)


async def test_a_batch_of_messages_is_cancelled(stage: Stage) -> None:
    import anthropic

    async with stage.anthropic(0) as client:
        given: Any = [{"custom_id": "long", "params": request(0, LONG)}]
        begun = await client.messages.batches.create(requests=given)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.batches.delete(begun.id)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.batches.create(requests=given * 2)
        stopped = await client.messages.batches.cancel(begun.id)
        assert stopped.processing_status == "canceling"

        async def over() -> bool:
            found = await client.messages.batches.retrieve(begun.id)
            return found.processing_status == "ended"

        await eventually(over)
        results = [each async for each in await client.messages.batches.results(begun.id)]
        assert [each.result.type for each in results] == ["canceled"]
    async with stage.openai(0) as other:
        assert begun.id not in [each.id async for each in other.files.list()]
