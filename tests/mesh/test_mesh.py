"""The whole path: HTTP in, tokens out, over real processes and the OpenAI SDK."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Decision,
    KvBatch,
    MessageDecoder,
    Outcome,
    RouteEvent,
    SeqAdd,
    SeqBatch,
    SeqFree,
    Stored,
)

MODEL = "kvmesh-demo"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), {"KVMESH_MOCK_SPEEDUP": "20"})
    try:
        mesh.start_all(workers=2)
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def stream(client: AsyncOpenAI, prompt: str, tokens: int) -> tuple[str, int, int, int]:
    """Text, prompt tokens, completion tokens and cached tokens of one streamed answer."""
    text: list[str] = []
    usage = (0, 0, 0)
    chunks = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            text.append(chunk.choices[0].delta.content)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else None
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached or 0)
    return "".join(text), *usage


async def test_the_sdk_streams_a_completion_with_usage(client: AsyncOpenAI) -> None:
    text, prompt, completion, _ = await stream(client, "Hello there", 24)
    assert text
    assert prompt > 2
    assert completion == 24
    whole = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello there"}], max_tokens=24
    )
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage
    assert whole.usage.completion_tokens == 24


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert MODEL in [model.id async for model in client.models.list()]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_repeated_prompt_is_read_from_cache(client: AsyncOpenAI) -> None:
    prompt = "An agent's long and unchanging instructions. " * 40
    _, tokens, _, first = await stream(client, prompt, 4)
    assert first < 32

    async def repeated() -> bool:
        return (await stream(client, prompt, 4))[3] >= tokens - 32

    await eventually(repeated, what="cached tokens of a repeated prompt")


async def test_ten_concurrent_streams_are_complete(client: AsyncOpenAI) -> None:
    prompts = [f"Stream number {index}" for index in range(10)]
    alone = [await stream(client, prompt, 60) for prompt in prompts[:2]]
    together = await asyncio.gather(*(stream(client, prompt, 60) for prompt in prompts))
    assert [answer[2] for answer in together] == [60] * 10
    assert [answer[1] for answer in together[:2]] == [answer[1] for answer in alone]


async def test_leaving_stops_the_engine(mesh: Mesh, client: AsyncOpenAI) -> None:
    chunks = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Go on for ever"}],
        max_tokens=50_000,
        extra_body={"ignore_eos": True},
        stream=True,
    )
    async for _ in chunks:
        break
    await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") == 1)
    await chunks.close()
    await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") == 0)


async def test_the_bus_shows_a_request(mesh: Mesh, client: AsyncOpenAI) -> None:
    bus = await Bus.connect(mesh.options, "test")
    stored: list[KvBatch] = []
    routed: list[RouteEvent] = []
    sequences: list[SeqBatch] = []

    async def on_kv(batch: KvBatch) -> None:
        stored.append(batch)

    async def on_route(event: RouteEvent) -> None:
        routed.append(event)

    async def on_sequence(batch: SeqBatch) -> None:
        sequences.append(batch)

    names = bus.subjects
    await bus.subscribe(names.kv_all, MessageDecoder(KvBatch), on_kv)
    await bus.subscribe(names.route_all, MessageDecoder(RouteEvent), on_route)
    await bus.subscribe(names.seq_all, MessageDecoder(SeqBatch), on_sequence)
    await bus.flush()
    await stream(client, "Something that nobody asked before. " * 20, 8)
    await eventually(lambda: stored and any(isinstance(e, Outcome) for e in routed))
    decision = next(event for event in routed if isinstance(event, Decision))
    outcome = next(event for event in routed if isinstance(event, Outcome))
    assert outcome.request == decision.request
    assert outcome.output_tokens == 8
    assert outcome.ttft_s is not None
    assert len(decision.candidates) == 2
    assert decision.chosen.cost == min(c.cost for c in decision.candidates)
    events = [event for batch in sequences for event in batch.events]
    assert any(isinstance(e, SeqAdd) and e.request == decision.request for e in events)
    await eventually(
        lambda: any(isinstance(e, SeqFree) for batch in sequences for e in batch.events)
    )
    await bus.close()


async def test_a_prompt_is_prefetched_before_its_request(mesh: Mesh) -> None:
    bus = await Bus.connect(mesh.options, "test")
    prompts: list[tuple[str, int]] = []

    async def on_kv(batch: KvBatch) -> None:
        stored = [e for e in batch.events if isinstance(e, Stored) and e.parent is None]
        prompts.extend((batch.instance, len(event.engine) // 8) for event in stored)

    await bus.subscribe(bus.subjects.kv_all, MessageDecoder(KvBatch), on_kv)
    await bus.flush()
    later = "What will be asked only later. " * 40
    body = {"model": MODEL, "messages": [{"role": "user", "content": later}], "compute": 160}
    url = f"{mesh.url}/v1/prefetch"
    status, answer = await asyncio.to_thread(post, url, json.dumps(body).encode())
    assert (status, answer["overlap"]) == (200, [0, 0, 0, 0]), answer
    computed = answer["instance"], 160 // 16
    await eventually(lambda: computed in prompts, timeout=PATIENCE_S, what="its blocks")
    await bus.close()


def post(url: str, body: bytes) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


HI = [{"role": "user", "content": "Hi"}]
BAD_BODIES = {
    "malformed JSON": (b'{"model": ', 400, None),
    "not an object": (b"[]", 400, None),
    "unknown model": (json.dumps({"model": "nope", "messages": HI}).encode(), 404, "model"),
    "empty messages": (json.dumps({"model": MODEL, "messages": []}).encode(), 400, "messages"),
    "no messages": (json.dumps({"model": MODEL}).encode(), 400, "messages"),
    "wrong type": (
        json.dumps({"model": MODEL, "messages": HI, "max_tokens": "many"}).encode(),
        400,
        "max_tokens",
    ),
    "out of range": (
        json.dumps({"model": MODEL, "messages": HI, "temperature": -1}).encode(),
        400,
        "temperature",
    ),
    "too long": (
        json.dumps({"model": MODEL, "messages": HI, "max_tokens": 10**9}).encode(),
        400,
        None,
    ),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_input_is_refused_in_the_callers_shape(mesh: Mesh, name: str) -> None:
    body, status, parameter = BAD_BODIES[name]
    got, answer = await asyncio.to_thread(post, f"{mesh.url}/v1/chat/completions", body)
    assert got == status, answer
    error = answer["error"]
    assert isinstance(error, dict)
    assert error["message"]
    assert error["type"]
    if parameter is not None:
        assert parameter in str(error["param"]) or parameter in error["message"]


async def test_a_prompt_beyond_the_context_is_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stream(client, "far too many words " * 200_000, 4)
    assert caught.value.code == "context_length_exceeded"


async def test_an_oversize_body_is_refused(nats_server: NatsServer, mesh: Mesh) -> None:
    body = b'{"model": "' + b"x" * (70 << 20) + b'"}'
    try:
        status, _ = await asyncio.to_thread(post, f"{mesh.url}/v1/chat/completions", body)
    except OSError:  # the server may hang up instead of reading it all
        return
    assert status == 413


async def test_nothing_is_left_over(mesh: Mesh, tmp_path: Path) -> None:
    await eventually(lambda: mesh.metric("kvmesh_frontend_active_requests") == 0)
    await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") == 0)


@pytest.mark.parametrize("role", ["frontend", "router", "indexer", "kvbm", "worker"])
async def test_a_taken_metrics_port_is_reported_in_one_line(
    nats_server: NatsServer, tmp_path: Path, role: str
) -> None:
    other = Mesh(nats_server.url, tmp_path)
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        other.start(role, "process", **{f"KVMESH_{role.upper()}_METRICS_PORT": port})
        try:
            status = await asyncio.to_thread(other.processes["process"].wait, PATIENCE_S)
        finally:
            other.stop()
    log = (tmp_path / "process.log").read_text()
    assert status == 1
    assert f"cannot serve metrics on 127.0.0.1 port {port}: Address already in use" in log
    assert "Traceback" not in log
    assert "leaked" not in log
