"""Background responses: their streams are resumed, also on another frontend once theirs is gone."""

import asyncio
import hashlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.frontend.http.responses.log import MAX_BODY, EventRecord, RunHead
from kvmesh.frontend.http.responses.store import ResponseStore

MODEL = "kvmesh-demo"
TOKENS = 300
PROMPT = "Tell a long story about a background response. " * 4


@pytest.fixture(scope="module")
def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Mesh, str]]:
    folder = tmp_path_factory.mktemp("background")
    mesh = Mesh(nats_server.url, folder)
    mesh.env["KVMESH_FRONTEND_KEYS_FILE"] = str(keys_file(folder))
    mesh.env["KVMESH_FRONTEND_DRAIN_TIMEOUT_S"] = "1"
    mesh.env["KVMESH_FRONTEND_KEEPALIVE_S"] = "0.3"
    other = free_port()
    try:
        mesh.start_all()
        mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(other))
        asyncio.run(mesh.ready())
        yield mesh, f"http://127.0.0.1:{other}"
    finally:
        mesh.stop()


@pytest_asyncio.fixture
async def clients(stage: tuple[Mesh, str]) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """A client of each frontend, once both are ready."""
    mesh, other = stage
    if "frontend-0" not in mesh.processes:
        mesh.restart("frontend-0")
    await eventually(lambda: ready(other) and ready(mesh.url))
    urls = (stage[0].url, stage[1])
    one, two = (AsyncOpenAI(base_url=f"{url}/v1", api_key="n", max_retries=0) for url in urls)
    async with one, two:
        yield one, two


def keys_file(folder: Path) -> Path:
    """Two keys of a tenant: `n`, and `one` with one request at a time."""
    path = folder / "keys.toml"
    for secret, more in (("n", ""), ("one", "concurrency = 1")):
        digest = hashlib.sha256(secret.encode()).hexdigest()
        with path.open("a") as file:
            file.write(f'[[key]]\nname = "{secret}"\nsha256 = "{digest}"\ntenant = "t"\n{more}\n')
    return path


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def request(prompt: str = PROMPT, **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": prompt, "max_output_tokens": TOKENS, "temperature": 0}
    return {**body, "extra_body": {"nvext": {"ignore_eos": True}}, **changes}


async def test_a_stream_goes_on_at_another_frontend_once_its_own_was_killed(
    stage: tuple[Mesh, str], clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    mesh, _ = stage
    one, two = clients
    expected = await two.responses.create(**request())
    seen: list[int] = []
    text, response_id = "", ""
    stream = await one.responses.create(**request(), background=True, stream=True)
    async for event in stream:
        seen.append(event.sequence_number)
        if event.type == "response.created":
            response_id = event.response.id
            assert event.response.background
        if event.type == "response.output_text.delta":
            text += event.delta
            if len(text) > 100:
                break
    await stream.close()
    mesh.kill("frontend-0")
    last = None
    async for event in await two.responses.retrieve(
        response_id, stream=True, starting_after=seen[-1]
    ):
        seen.append(event.sequence_number)
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
    assert seen == list(range(len(seen)))
    assert text == expected.output_text
    assert last is not None
    assert last.type == f"response.{expected.status}", last
    found = await two.responses.retrieve(response_id)
    assert (found.output_text, found.status) == (expected.output_text, expected.status)
    assert found.usage is not None
    assert expected.usage is not None
    assert found.usage.output_tokens == expected.usage.output_tokens
    await two.responses.delete(response_id)
    with pytest.raises(NotFoundError):
        await two.responses.retrieve(response_id)


async def test_a_response_that_nobody_reads_is_finished(
    stage: tuple[Mesh, str], clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    _, other = stage
    one, two = clients
    begun = await one.responses.create(**request(max_output_tokens=20), background=True)
    assert begun.status == "in_progress"

    async def finished() -> bool:
        return (await two.responses.retrieve(begun.id)).status == "incomplete"

    await eventually(finished)
    headers = {"Authorization": "Bearer n"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as http:
        url = f"{other}/v1/responses/{begun.id}"
        whole = await http.get(url, params={"stream": "true"})
        ids = [line for line in whole.text.splitlines() if line.startswith("id: ")]
        assert ids == [f"id: {number}" for number in range(len(ids))]
        rest = await http.get(
            url, params={"stream": "true"}, headers={"Last-Event-ID": str(len(ids) - 2)}
        )
        events = [line for line in rest.text.splitlines() if line.startswith("event: ")]
        assert events == ["event: response.incomplete"]
        refused = await http.get(url, params={"stream": "true", "starting_after": "x"})
        assert refused.status_code == 400
        for path in ("resp_unknown", "x"):
            missing = await http.get(f"{other}/v1/responses/{path}", params={"stream": "true"})
            assert missing.status_code == 404


async def test_a_response_is_cancelled_at_any_frontend(
    stage: tuple[Mesh, str], clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    mesh, _ = stage
    one, two = clients
    begun = await one.responses.create(**request(max_output_tokens=5000), background=True)
    cancelled = await two.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert (await one.responses.retrieve(begun.id)).status == "cancelled"

    def stopped() -> bool:
        return mesh.metrics().get("kvmesh_frontend_active_requests", 0.0) == 0.0

    await eventually(stopped)
    assert (await one.responses.cancel(begun.id)).status == "cancelled"
    await one.responses.delete(begun.id)
    plain = await one.responses.create(**request(max_output_tokens=5))
    with pytest.raises(BadRequestError):
        await one.responses.cancel(plain.id)
    with pytest.raises(BadRequestError):
        await one.responses.create(**request(), background=True, store=False)


async def test_a_response_goes_on_once_its_frontend_has_stopped(
    stage: tuple[Mesh, str], clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    mesh, _ = stage
    one, two = clients
    expected = await two.responses.create(**request())
    stream = await one.responses.create(**request(), background=True, stream=True)
    text, response_id, last = "", "", -1
    try:
        async for event in stream:
            last = event.sequence_number
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                if not text:
                    mesh.processes["frontend-0"].send_signal(signal.SIGTERM)
                text += event.delta
    except (httpx.HTTPError, APIError):
        pass
    mesh.kill("frontend-0", signal.SIGTERM)
    assert len(text) < len(expected.output_text)
    async for event in await two.responses.retrieve(response_id, stream=True, starting_after=last):
        if event.type == "response.output_text.delta":
            text += event.delta
    found = await two.responses.retrieve(response_id)
    assert (found.status, found.output_text) == (expected.status, expected.output_text)
    assert text == expected.output_text


async def test_a_response_that_another_frontend_generates_is_deleted(
    stage: tuple[Mesh, str], clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    mesh, _ = stage
    one, two = clients
    begun = await one.responses.create(**request(max_output_tokens=5000), background=True)
    await two.responses.delete(begun.id)

    def stopped() -> bool:
        return mesh.metrics().get("kvmesh_frontend_active_requests", 0.0) == 0.0

    await eventually(stopped)
    for client in (one, two):
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_who_reads_a_response_has_the_key_for_other_requests_afterwards(
    stage: tuple[Mesh, str], clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    mesh, other = stage
    one, _ = clients
    begun = await one.responses.create(**request(max_output_tokens=100), background=True)
    mesh.kill("frontend-0")
    async with AsyncOpenAI(base_url=f"{other}/v1", api_key="one", max_retries=0) as reader:

        async def finished() -> bool:
            return (await reader.responses.retrieve(begun.id)).status != "in_progress"

        await eventually(finished)
        assert (await reader.responses.retrieve(begun.id)).output_text


async def test_events_that_exceed_a_message_are_stored_and_deleted(tmp_path: Path) -> None:
    """Under a NATS server with the least `max_payload`."""
    server = NatsServer(tmp_path / "nats")
    server.max_payload = "1MB"
    server.start()
    bus = await Bus.connect(BusOptions(url=server.url), "test")
    try:
        store = ResponseStore(bus, 3600.0, 256 << 20)
        await ensure_streams(bus)
        log = store.log("resp_large", "tenant")
        noise = random.Random(0).randbytes
        body, response = noise(MAX_BODY), noise(3 << 20)
        revision = await log.begin(RunHead("frontend", "t", 0, body, {}, b"{}"))
        records = [EventRecord(noise(size), [1], [1]) for size in (10, 5 << 20)]
        for number, record in enumerate(records):
            await log.append(number, record)
        head, _ = await log.head()
        assert head.body == body
        await log.replace(RunHead("", "t", 0, b"", {}, response), revision)
        assert (await log.head())[0].response == response
        assert [await log.record(number) for number in range(3)] == [*records, None]
        await store.purge("resp_large", "tenant")
        stream = f"KV_{bus.subjects.responses_bucket}"
        assert (await bus.js.stream_info(stream)).state.messages == 0
        assert bus.counts.reconnects == 0
    finally:
        await bus.close()
        server.stop()
