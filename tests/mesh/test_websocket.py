"""Responses over WebSockets on a real mesh, by OpenAI's own client."""

import asyncio
import hashlib
import itertools
import json
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.resources.responses.responses import AsyncResponsesConnection
from support.mesh import Mesh, scrape
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "kvmesh-demo"
BLOCK = 16
END = ("response.completed", "response.incomplete", "response.failed", "error")
STORY = "Tell a long story about a connection that stays open. " * 8
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def mesh(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("websocket")
    mesh = Mesh(nats_server.url, folder)
    keys = folder / "keys.toml"
    for secret, more in (("n", ""), ("one", "concurrency = 1")):
        digest = hashlib.sha256(secret.encode()).hexdigest()
        with keys.open("a") as file:
            file.write(f'[[key]]\nname = "{secret}"\nsha256 = "{digest}"\ntenant = "t"\n{more}\n')
    mesh.env |= {
        "KVMESH_FRONTEND_KEYS_FILE": str(keys),
        "KVMESH_FRONTEND_SPECULATIVE_PREFILL": "off",
        "KVMESH_MOCK_SPEEDUP": "4",
    }
    try:
        mesh.start_all()
        asyncio.run(mesh.ready())
        yield mesh
    finally:
        mesh.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="n", max_retries=0) as client:
        yield client


class Lane:
    """One connection of OpenAI's client; the events of each lane that were read for another."""

    def __init__(self, connection: AsyncResponsesConnection) -> None:
        self.connection = connection
        self.events: list[Any] = []

    async def create(self, **fields: Any) -> None:
        event: Any = {"type": "response.create", **GREEDY, **fields}
        await self.connection.send(event)

    async def end(self, lane: str | None = None) -> Any:
        """The last event of the lane's response; raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                event = await self.connection.recv()
                self.events.append(event)
                if event.type in END and getattr(event, "stream_id", None) == lane:
                    return event

    async def ask(self, **fields: Any) -> Any:
        """The finished response."""
        await self.create(**fields)
        event = await self.end(fields.get("stream_id"))
        assert event.type in ("response.completed", "response.incomplete"), event
        return event.response


async def asked(client: AsyncOpenAI, **fields: Any) -> Any:
    """A response over HTTP."""
    responses: Any = client.responses
    return await responses.create(**GREEDY, **fields)


@asynccontextmanager
async def connected(client: AsyncOpenAI) -> AsyncIterator[Lane]:
    async with client.responses.connect() as connection:
        yield Lane(connection)


def unique(text: str) -> str:
    return f"{secrets.token_hex(8)} {text}"


def words(response: Any) -> str:
    return "".join(part.text for item in response.output for part in item.content or [])


async def test_a_conversation_that_is_not_stored_goes_on_by_what_it_adds(
    client: AsyncOpenAI,
) -> None:
    question = unique(STORY)
    async with connected(client) as lane:
        first = await lane.ask(input=question, store=False)
        numbers = [event.sequence_number for event in lane.events]
        assert numbers == [*range(len(numbers))]
        assert [event.type for event in lane.events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        previous = {"previous_response_id": first.id, "store": False}
        second = await lane.ask(input="And then?", **previous)
        assert (
            second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 2 * BLOCK
        )
        history: list[Any] = [
            {"role": "user", "content": question},
            *(item.to_dict() for item in first.output),
            {"role": "user", "content": "And then?"},
        ]
        over_http = await asked(client, input=history, store=False)
        assert over_http.output_text == words(second)
        assert over_http.usage is not None
        assert over_http.usage.input_tokens == second.usage.input_tokens
        async with connected(client) as other:
            await other.create(input="x", **previous)
            refused = await other.end()
            assert (refused.status, refused.error.code) == (400, "previous_response_not_found")
        await lane.create(input="x", previous_response_id=first.id)  # no longer the latest one
        assert (await lane.end()).error.code == "previous_response_not_found"
        third = await lane.ask(input="x", previous_response_id=second.id)
        assert third.usage.input_tokens > second.usage.total_tokens


async def test_a_stored_response_has_all_that_was_not_stored_before_it(
    client: AsyncOpenAI,
) -> None:
    async with connected(client) as lane:
        first = await lane.ask(input=unique("First"), store=False)
        second = await lane.ask(input="Second", previous_response_id=first.id)
    async with connected(client) as other:
        third = await other.ask(input="Third", previous_response_id=second.id)
        assert third.usage.input_tokens > second.usage.total_tokens
    items = await client.responses.input_items.list(third.id, order="asc")
    assert len(items.data) == 5
    fourth = await asked(client, input="Fourth", previous_response_id=third.id)
    assert fourth.usage is not None
    assert fourth.usage.input_tokens > third.usage.total_tokens


async def test_lanes_run_at_once_and_fork(client: AsyncOpenAI) -> None:
    async with connected(client) as lane:
        names = [f"lane-{number}" for number in range(4)]
        for name in names:
            await lane.create(input=unique(STORY), stream_id=name, store=False)
        ended: dict[str, Any] = {}
        async with asyncio.timeout(PATIENCE_S):
            while len(ended) < len(names):
                event: Any = await lane.connection.recv()
                lane.events.append(event)
                if event.type in END:
                    ended[event.stream_id] = event
        order = [event.stream_id for event in lane.events]
        assert set(order) == set(names)
        assert sum(a != b for a, b in itertools.pairwise(order)) > len(names)
        parent = ended["lane-0"].response
        fork = {"input": "Other", "previous_response_id": parent.id, "store": False}
        await lane.create(stream_id="fork", **fork)
        await lane.create(stream_id="lane-0", **fork)
        forked = [await lane.end("fork")]
        seen = [e for e in lane.events if e.type in END and e.stream_id == "lane-0"]
        forked.append(seen[1] if len(seen) > 1 else await lane.end("lane-0"))
        assert {words(event.response) for event in forked} == {words(forked[0].response)}


async def test_a_lane_answers_in_order(client: AsyncOpenAI) -> None:
    async with connected(client) as lane:
        for number in range(3):
            await lane.create(input=unique("Hi"), metadata={"number": str(number)}, store=False)
        ended = [(await lane.end()).response for _ in range(3)]
        assert [response.metadata["number"] for response in ended] == ["0", "1", "2"]
        kinds = [event.type for event in lane.events]
        assert [k for k in kinds if k in (*END, "response.created")] == [
            "response.created",
            "response.incomplete",
        ] * 3


@pytest.mark.parametrize("over", ["websocket", "http"])
async def test_a_preload_computes_the_prompt_ahead(client: AsyncOpenAI, over: str) -> None:
    tools = [{"type": "function", "name": "f", "description": STORY * 4, "parameters": {}}]
    prompt: Json = {"instructions": unique(STORY * 8), "tools": tools}
    async with connected(client) as lane:
        if over == "http":
            body: Json = {"generate": False, "prompt_cache_options": {"prewarm": True}}
            ahead = await asked(client, **prompt, extra_body=body)
        else:
            ahead = await lane.ask(**prompt, generate=False, store=False)
        assert (ahead.output, ahead.status) == ([], "completed")
        assert ahead.usage.output_tokens == 0
        assert ahead.usage.input_tokens > 500

        async def computed() -> bool:
            """True if a request that only shares this prompt finds it."""
            other = await lane.ask(**prompt, input=unique("Hello"), store=False)
            return bool(
                other.usage.input_tokens_details.cached_tokens >= ahead.usage.input_tokens - BLOCK
            )

        answered = await lane.ask(**prompt, input="Hello", previous_response_id=ahead.id)
        assert answered.usage.input_tokens > ahead.usage.input_tokens
        details = answered.usage.input_tokens_details
        assert details.cached_tokens >= ahead.usage.input_tokens - 2 * BLOCK or await computed()


async def test_limits_hold_for_each_request_and_not_for_the_connection(mesh: Mesh) -> None:
    async with (
        AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="one", max_retries=0) as client,
        connected(client) as idle,
        connected(client) as lane,
    ):
        await asked(client, input="Hi", store=False)
        await lane.create(input=STORY, stream_id="a", store=False)
        await lane.create(input=STORY, stream_id="b", store=False)
        refused = await lane.end("b")
        assert (refused.status, refused.error.code) == (429, "rate_limit_exceeded")
        assert refused.error.headers["Retry-After"]
        assert (await lane.end("a")).type == "response.incomplete"
        assert (await lane.ask(input=STORY, stream_id="b", store=False)).output
        assert (await idle.ask(input="Hi", store=False)).output


async def test_a_lost_worker_is_a_pause(mesh: Mesh, client: AsyncOpenAI) -> None:
    asked = {"input": unique(STORY), "store": False, "max_output_tokens": 400}
    async with connected(client) as lane:
        expected = words(await lane.ask(**asked))
        lane.events.clear()
        await lane.create(**asked)
        async with asyncio.timeout(PATIENCE_S):
            while (await lane.connection.recv()).type != "response.output_text.delta":
                pass
        killed = await running_worker(mesh)
        mesh.kill(killed)
        done = await lane.end()
        assert words(done.response) == expected
        mesh.restart(killed)
    await eventually(lambda: mesh.live_workers() == 2)


async def running_worker(mesh: Mesh) -> str:
    """The worker that runs a sequence now."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for name, port in mesh.worker_ports.items():
                samples = scrape(port)
                if sum(v for k, v in samples.items() if k.startswith("kvmesh_worker_running")):
                    return name
            await asyncio.sleep(0)


async def test_a_client_that_leaves_ends_its_responses(mesh: Mesh, client: AsyncOpenAI) -> None:
    async with connected(client) as lane:
        for name in ("a", "b"):
            await lane.create(input=unique(STORY), stream_id=name, max_output_tokens=4000)
        async with asyncio.timeout(PATIENCE_S):
            while (await lane.connection.recv()).type != "response.output_text.delta":
                pass
        assert mesh.metric("kvmesh_frontend_websockets") == 1
    await eventually(lambda: mesh.metric("kvmesh_frontend_active_requests") == 0)
    await eventually(lambda: mesh.metric("kvmesh_frontend_websockets") == 0)


async def test_a_frontend_that_stops_finishes_what_runs(mesh: Mesh) -> None:
    port = free_port()
    mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(port))
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    await eventually(ready)
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="n", max_retries=0) as client,
        connected(client) as lane,
        connected(client) as idle,
    ):
        # fewer tokens than the shortest answer has, so that its end is the limit
        await lane.create(input=unique(STORY), max_output_tokens=250, store=False)
        async with asyncio.timeout(PATIENCE_S):
            while (await lane.connection.recv()).type != "response.output_text.delta":
                pass
        process = mesh.processes.pop("frontend-1")
        process.send_signal(signal.SIGTERM)
        left = await idle.end()
        assert left.error.code == "websocket_connection_limit_reached"
        await lane.create(input="late", stream_id="late", store=False)
        late = await lane.end("late")
        assert late.error.code == "websocket_connection_limit_reached"
        assert (await lane.end()).type in ("response.incomplete", "response.completed")
        assert (await lane.end()).error.code == "websocket_connection_limit_reached"
        await asyncio.to_thread(process.wait, PATIENCE_S)


async def test_the_access_log_has_a_line_for_each_request(mesh: Mesh, client: AsyncOpenAI) -> None:
    async with connected(client) as lane:
        response = await lane.ask(input="Hi", store=False)

    def line() -> str:
        lines = (mesh.folder / "frontend-0.log").read_text().splitlines()
        return next((each for each in lines if response.id in each), "")

    await eventually(lambda: bool(line()))
    assert "WEBSOCKET /v1/responses 200" in line(), line()
    assert "model=kvmesh-demo" in line()
    assert json.dumps(response.id)[1:-1] in line()
