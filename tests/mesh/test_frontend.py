"""The frontend process against scripted routers and workers, seen by its clients."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from support.frontend import (
    CONTEXT,
    LIMITS,
    MODEL,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    attempt,
    client_session,
    events,
    frontend_mesh,
    ids,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Chunk,
    MessageDecoder,
    Outcome,
    Refused,
    RouteEvent,
    SeqBatch,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
SETTINGS = {
    "KVMESH_FRONTEND_KEEPALIVE_S": "0.5",
    "KVMESH_FRONTEND_BODY_TIMEOUT_S": "1",
    "KVMESH_FRONTEND_IDLE_TIMEOUT_S": "1",
    "KVMESH_FRONTEND_MAX_BODY_BYTES": "2000000",
    "KVMESH_FRONTEND_SLOW_READER_S": "2",
    "KVMESH_FRONTEND_MIGRATION_LIMIT": "1",
    **stream_env(LIMITS),
}


@dataclass
class Stage:
    """One frontend and its scripted peers; `a` is preferred by the router."""

    mesh: Mesh
    bus: Bus
    client: Client
    router: ScriptedRouter
    a: ScriptedWorker
    b: ScriptedWorker
    sequence_events: list[SeqEvent]
    outcomes: list[Outcome]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with (
        frontend_mesh(nats_server.url, tmp_path_factory.mktemp("frontend"), SETTINGS) as (
            mesh,
            bus,
        ),
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "a") as a,
        scripted_worker(bus, LIMITS, "b") as b,
        client_session() as session,
    ):
        stage = Stage(mesh, bus, Client(mesh.url, session), router, a, b, [], [])
        await watch(stage)
        await mesh.ready()
        yield stage


async def watch(stage: Stage) -> None:
    async def batch(message: SeqBatch) -> None:
        stage.sequence_events.extend(message.events)

    async def outcome(message: RouteEvent) -> None:
        if isinstance(message, Outcome):
            stage.outcomes.append(message)

    route_events: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
    seq_batches = MessageDecoder(SeqBatch)
    await stage.bus.subscribe(stage.bus.subjects.seq(MODEL), seq_batches, batch)
    await stage.bus.subscribe(stage.bus.subjects.route(MODEL), route_events, outcome)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    shared.router.order = [shared.a.instance, shared.b.instance]
    shared.router.refusal, shared.router.queues_all = None, False
    shared.router.requests.clear()
    for worker in (shared.a, shared.b):
        worker.status, worker.control_ok, worker.stores_prompts = "accepted", True, False
        worker.works.clear()
        worker.cancelled.clear()
        worker.resends.clear()
    shared.sequence_events.clear()
    shared.outcomes.clear()
    return shared


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **changes}


def text_of(chunks: list[Any]) -> str:
    deltas = [c["choices"][0]["delta"] for c in chunks if c != "[DONE]" and c.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_a_whole_answer_states_text_finish_and_usage(stage: Stage) -> None:
    pending = asyncio.create_task(stage.client.post(CHAT, body(max_tokens=50)))
    work = await stage.a.work()
    tokens = ids("Good day 🧿 to you")
    await stage.a.send(work, Chunk(work.request, 0, tokens[:2], cached=[4, 0]))
    await stage.a.send(work, Chunk(work.request, 2, tokens[2:], finish="stop"))
    status, answer = await pending
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Good day 🧿 to you"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert answer["usage"]["prompt_tokens"] == len(work.tokens) // 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert work.sampling.max_tokens == 50


async def test_a_stream_ends_with_finish_usage_and_done(stage: Stage) -> None:
    pending = body(stream=True, stream_options={"include_usage": True})
    response = await asyncio.create_task(started(stage, pending))
    work = await stage.a.work()
    assert work.sampling.max_tokens == CONTEXT - len(work.tokens) // 4
    await stage.a.send(work, Chunk(work.request, 0, ids("One"), cached=[0]))
    await stage.a.send(work, Chunk(work.request, len(ids("One")), ids(" two"), finish="length"))
    chunks = await events(response)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(chunks) == "One two"
    assert chunks[-3]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == len(ids("One")) + len(ids(" two"))
    assert chunks[-1] == "[DONE]"


async def started(stage: Stage, pending: object) -> aiohttp.ClientResponse:
    response = await stage.client.stream(CHAT, pending)
    assert response.status == 200
    return response


async def test_names_of_unknown_models_become_no_labels(stage: Stage) -> None:
    for path in (CHAT, "/v1/tokenize", "/v1/detokenize"):
        sent_body = body(tokens=[1]) | {"model": "chosen-by-a-caller"}
        status, _ = await stage.client.post(path, sent_body)
        assert status == 404
    assert not [sample for sample in stage.mesh.metrics() if "chosen-by-a-caller" in sample]


async def test_the_outcome_of_a_request_is_published(stage: Stage) -> None:
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, [300], cached=[4]))
    await eventually(lambda: SeqPrefilled(attempt(work)) in stage.sequence_events)
    await stage.a.send(work, Chunk(work.request, 1, [300], finish="stop"))
    await pending
    of_this = await eventually(lambda: [o for o in stage.outcomes if o.request == attempt(work)])
    outcome = of_this[0]
    assert outcome.instance == stage.a.instance
    assert (outcome.cached_tokens, outcome.output_tokens, outcome.finish) == (4, 2, "stop")
    assert outcome.ttft_s is not None
    await eventually(lambda: SeqFree(attempt(work)) in stage.sequence_events)
    assert stage.a.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_counts_as_prefilled_from_the_first_token_on(
    stage: Stage, stream: bool
) -> None:
    pending = asyncio.create_task(stage.client.stream(CHAT, body(stream=stream)))
    work = await stage.a.work()
    if stream:
        await pending  # the stream is open without an event
    await events_published(stage)
    assert SeqPrefilled(attempt(work)) not in stage.sequence_events
    await stage.a.send(work, Chunk(work.request, 0, ids("One"), cached=[0]))
    await eventually(lambda: SeqPrefilled(attempt(work)) in stage.sequence_events)
    await stage.a.send(work, Chunk(work.request, len(ids("One")), ids(" two"), finish="stop"))
    answer = await pending
    assert answer.status == 200
    await answer.read()


async def events_published(stage: Stage) -> None:
    """Wait until all earlier events of the frontend are published, by those of one more request."""
    request = asyncio.create_task(stage.client.post(CHAT, body()))
    work = await stage.a.work(len(stage.a.works))
    await stage.a.send(work, Chunk(work.request, 0, ids("Done"), finish="stop"))
    await request
    await eventually(lambda: SeqFree(attempt(work)) in stage.sequence_events)


@pytest.mark.parametrize("status", ["busy", "draining"])
async def test_a_worker_that_refuses_is_excluded(stage: Stage, status: str) -> None:
    stage.a.status = status
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    work = await stage.b.work()
    await stage.b.send(work, Chunk(work.request, 0, [300], finish="stop"))
    assert (await pending)[0] == 200
    assert stage.router.requests[1].placement.exclude == [stage.a.instance]
    first, second = stage.router.requests
    assert first.request != second.request
    await eventually(
        lambda: {SeqFree(first.request), SeqFree(second.request)} <= {*stage.sequence_events}
    )


async def test_a_worker_whose_adapter_has_just_left_is_not_excluded(stage: Stage) -> None:
    stage.a.status = "unloaded"
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    await stage.a.work()
    stage.a.status = "accepted"
    await eventually(lambda: len(stage.router.requests) >= 2)
    work = await stage.a.work(len(stage.router.requests) - 1)
    await stage.a.send(work, Chunk(work.request, 0, [300], finish="stop"))
    assert (await pending)[0] == 200
    assert {tuple(each.placement.exclude) for each in stage.router.requests} == {()}


async def test_a_retained_prompt_is_sent_again_only_if_the_worker_has_lost_it(stage: Stage) -> None:
    stage.a.stores_prompts = True
    messages = [{"role": "user", "content": "Hello there. " * 50}]
    headers = {"x-session-id": "keeping"}
    for turn, number in ((1, 0), (2, 2)):
        pending = asyncio.create_task(stage.client.stream(CHAT, body(messages=messages), **headers))
        work = await stage.a.work(number)
        await stage.a.send(work, Chunk(work.request, 0, [300], finish="stop"))
        assert (await pending).status == 200
        messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": f"{turn}"}]
    first, short, whole = stage.a.works
    assert (first.base, short.base, whole.base) == ("", first.request, "")
    assert whole.tokens == first.tokens[: 4 * short.shared] + short.tokens
    assert len(short.tokens) < len(whole.tokens)


async def test_constraints_that_no_worker_meets_are_refused_at_once(stage: Stage) -> None:
    reason = "no worker meets the constraints"
    stage.router.refusal = Refused(code="no_workers", reason=reason, unmet=True)
    status, answer = await stage.client.post(CHAT, body())
    assert status == 503
    assert reason in answer["error"]["message"]
    assert len(stage.router.requests) == 1


async def test_an_unavailable_router_is_not_reported_as_a_lack_of_workers(stage: Stage) -> None:
    stage.router.refusal = Refused(code="unavailable", reason="the router failed; see its log")
    for path, form in ((CHAT, body()), ("/v1/messages", body(max_tokens=9))):
        status, answer = await stage.client.post(path, form)
        message = answer["error"]["message"]
        assert status == 503
        assert message.endswith("cannot be served now: the router failed; see its log")


async def test_if_all_workers_are_busy_the_client_is_told_to_retry(stage: Stage) -> None:
    stage.a.status = stage.b.status = "busy"
    response = await stage.client.stream(CHAT, body())
    assert response.status == 429
    assert response.headers["retry-after"] == "2"
    assert (await response.json())["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("code", "status"), [("overloaded", 429), ("invalid", 400), ("deadline", 504)]
)
async def test_a_router_s_refusal_reaches_the_client(stage: Stage, code: Any, status: int) -> None:
    stage.router.refusal = Refused(code=code, reason="not today", retry_after_s=3.0)
    got, answer = await stage.client.post(CHAT, body())
    assert got == status
    assert "not today" in answer["error"]["message"]


async def test_a_client_that_leaves_is_removed_from_the_queue(stage: Stage) -> None:
    stage.router.queues_all = True
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    (sent_body,) = await eventually(lambda: stage.router.requests)
    pending.cancel()
    await eventually(lambda: SeqFree(sent_body.request) in stage.sequence_events)
    assert not stage.a.works


async def test_a_client_that_leaves_frees_the_engine(stage: Stage) -> None:
    response = await started(stage, body(stream=True))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, [300]))
    await response.content.readany()
    response.close()
    await eventually(lambda: stage.a.cancelled == [work.request])
    await eventually(lambda: SeqFree(attempt(work)) in stage.sequence_events)


async def test_a_stop_string_ends_answer_and_engine(stage: Stage) -> None:
    pending = asyncio.create_task(stage.client.post(CHAT, body(stop=["two"])))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, ids("one two three")))
    _, answer = await pending
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    await eventually(lambda: stage.a.cancelled == [work.request])


async def test_a_stop_string_across_frames_is_never_shown(stage: Stage) -> None:
    response = await started(stage, body(stream=True, stop=["stop here"]))
    work = await stage.a.work()
    tokens = ids("words before stop here and after")
    for offset, token in enumerate(tokens):
        await stage.a.send(work, Chunk(work.request, offset, [token]))
        await asyncio.sleep(0.02)  # one frame per token
    chunks = await events(response)
    assert text_of(chunks) == "words before "
    assert [c["choices"][0]["finish_reason"] for c in chunks if c != "[DONE]" and c["choices"]][
        -1
    ] == "stop"
    await eventually(lambda: stage.a.cancelled == [work.request])


async def test_without_parallel_calls_the_first_call_ends_the_answer(stage: Stage) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    sent = body(tools=tools, parallel_tool_calls=False)
    pending = asyncio.create_task(stage.client.post(CHAT, sent))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, ids(call + call)))
    _, answer = await pending
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    await eventually(lambda: stage.a.cancelled == [work.request])
    await eventually(lambda: [each.finish for each in stage.outcomes] == ["tool_calls"])


async def test_a_call_that_breaks_off_is_text_in_a_whole_answer(stage: Stage) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    pending = asyncio.create_task(stage.client.post(CHAT, body(tools=tools)))
    work = await stage.a.work()
    begun = '<tool_call>\n{"name": "f", "arguments": {"a": 1'
    await stage.a.send(work, Chunk(work.request, 0, ids(begun), finish="length"))
    choice = (await pending)[1]["choices"][0]
    assert choice["message"].get("tool_calls") is None
    assert choice["message"]["content"] == begun
    assert choice["finish_reason"] == "length"


async def test_missing_tokens_are_requested_again(stage: Stage) -> None:
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    work = await stage.a.work()
    tokens = ids("a lot of words to lose")
    await stage.a.send(work, Chunk(work.request, 0, tokens[:1]))
    await stage.a.send(work, Chunk(work.request, 3, tokens[3:], finish="stop"))
    resend = (await eventually(lambda: stage.a.resends))[0]
    assert resend.offset == 1
    await stage.a.send(work, Chunk(work.request, 1, tokens[1:], finish="stop"))
    _, answer = await pending
    assert answer["choices"][0]["message"]["content"] == "a lot of words to lose"


async def test_a_request_unknown_to_its_worker_migrates(stage: Stage) -> None:
    stage.a.control_ok = False
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, [300]))
    moved = await stage.b.work()
    assert moved.generated == 1
    await stage.b.send(moved, Chunk(moved.request, 1, [301], finish="stop"))
    assert (await pending)[0] == 200


@pytest.mark.parametrize("strict", [True, False])
async def test_strict_tools_reach_the_engine_as_tags(stage: Stage, strict: bool) -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "strict": strict}
    tools = [{"type": "function", "function": function}]
    pending = asyncio.create_task(stage.client.post(CHAT, body(tools=tools)))
    work = await stage.a.work()
    guided = work.sampling.guided
    assert (guided.kind if guided else None) == ("structural_tag" if strict else None)
    await stage.a.send(work, Chunk(work.request, 0, [300], finish="stop"))
    assert (await pending)[0] == 200


async def test_a_stream_survives_the_death_of_its_worker(stage: Stage) -> None:
    async with scripted_worker(stage.bus, LIMITS, "mortal") as mortal:
        stage.router.order.insert(0, mortal.instance)
        response = await started(stage, body(stream=True, max_tokens=20))
        work = await mortal.work()
        tokens = ids("sent by two workers, received as one")
        await mortal.send(work, Chunk(work.request, 0, tokens[:3], cached=[0]))
        await mortal.unsubscribe()
        moved = await stage.a.work()
        assert moved.tokens[: len(work.tokens)] == work.tokens
        assert len(moved.tokens) == len(work.tokens) + 4 * 3
        assert (moved.generated, moved.sampling.max_tokens) == (3, 20)
        await stage.a.send(moved, Chunk(moved.request, 3, tokens[3:], finish="stop", cached=[0]))
        assert text_of(await events(response)) == "sent by two workers, received as one"
        assert mortal.instance in stage.router.requests[-1].placement.exclude


async def test_the_migrations_of_a_request_are_limited(stage: Stage) -> None:
    response = await started(stage, body(stream=True))
    first = await stage.a.work()
    await stage.a.send(first, Chunk(first.request, 0, [300], finish="abort"))
    second = await stage.b.work()
    await stage.b.send(second, Chunk(second.request, 1, [300], finish="abort"))
    chunks = await events(response)
    assert chunks[-2]["error"]["code"] == "unavailable"
    assert chunks[-1] == "[DONE]"


async def test_silence_is_filled_with_comments(stage: Stage) -> None:
    response = await started(stage, body(stream=True))
    work = await stage.a.work()
    await response.content.readuntil(b"\n\n")
    assert await response.content.readline() == b": keep-alive\n"
    await stage.a.send(work, Chunk(work.request, 0, [300], finish="stop"))
    await response.text()


async def test_an_engine_error_after_the_first_byte_is_an_event(stage: Stage) -> None:
    response = await started(stage, body(stream=True))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, [300]))
    await stage.a.send(work, Chunk(work.request, 1, [], finish="error", error="it broke"))
    chunks = await events(response)
    assert "it broke" in chunks[-2]["error"]["message"]


async def test_a_client_that_does_not_read_is_disconnected(stage: Stage) -> None:
    payload = msgspec.json.encode(body(stream=True))
    with socket.create_connection(("127.0.0.1", stage.mesh.port)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n"
        raw.sendall(head.encode() + payload)
        work = await stage.a.work()
        flood = asyncio.create_task(send_endlessly(stage.a, work))
        await eventually(lambda: stage.a.cancelled == [work.request])
        flood.cancel()
        await asyncio.wait([flood])


async def send_endlessly(worker: ScriptedWorker, work: Any) -> None:
    offset = 0
    while True:
        await worker.send(work, Chunk(work.request, offset, [300] * 20_000))
        offset += 20_000
        await asyncio.sleep(0.01)


BAD: list[tuple[Any, int, str | None, str | None]] = [
    (b'{"model": ', 400, None, None),
    (b"", 400, None, None),
    (b"[]", 400, None, None),
    (b'{"model":"kvmesh-demo","messages":' + b"[" * 9999 + b"]" * 9999 + b"}", 400, None, None),
    (body(x=0) | {"model": "nope"}, 404, "model", "model_not_found"),
    (body(messages=[]), 400, "messages", None),
    ({"model": MODEL}, 400, "messages", None),
    (body(max_tokens="many"), 400, "max_tokens", None),
    (body(max_tokens=0), 400, "max_tokens", None),
    (body(temperature=9), 400, "temperature", None),
    (body(messages=[{"role": "user", "content": [{"type": "text", "text": 3}]}]), 400, None, None),
    (body(messages=[{"role": "judge", "content": "x"}]), 400, "messages[0].role", None),
    (body(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0].tool_call_id", None),
    (body(n=1000), 400, "n", None),
    (body(stop=["x"] * 1000), 400, "stop", None),
    (body(max_tokens=CONTEXT), 400, None, "context_length_exceeded"),
    (body(messages=[{"role": "user", "content": "x y " * 4000}]), 400, None, None),
    (b" " * 3_000_000, 413, None, None),
]


@pytest.mark.parametrize(("sent", "status", "param", "code"), BAD)
async def test_bad_input_gets_a_clear_error(
    stage: Stage, sent: Any, status: int, param: str | None, code: str | None
) -> None:
    got, answer = await stage.client.post(CHAT, sent)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param
    if code is not None:
        assert answer["error"]["code"] == code
    assert stage.router.requests == []


async def test_a_body_that_does_not_say_how_long_it_is_is_bounded(stage: Stage) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 100_000

    async with stage.client.session.post(stage.client.url + CHAT, data=endless()) as response:
        assert response.status == 413
        assert "larger than 2000000 bytes" in await response.text()


DEEP = b'{"a":' * 9000 + b"1" + b"}" * 9000
NESTED = (
    b'{"model":"kvmesh-demo","messages":[{"role":"user","content":"x"}],"tools":'
    b'[{"type":"function","function":{"name":"f","parameters":' + DEEP + b"}}]}"
)


async def test_what_is_nested_too_deeply_is_the_caller_s_fault(stage: Stage) -> None:
    for path in (CHAT, "/v1/tokenize"):
        status, answer = await stage.client.post(path, NESTED)
        assert status == 400
        assert "nested" in answer["error"]["message"]


@pytest.mark.parametrize("sent", ["POST", f"POST {CHAT} HTTP/1.1\r\nContent-Length: 9\r\n\r\n{{"])
async def test_a_request_that_never_comes_is_not_waited_for(stage: Stage, sent: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.mesh.port)
    writer.write(sent.encode())
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert answer == b"" or b" 400 " in answer.splitlines()[0]
    writer.close()
    await writer.wait_closed()


async def test_an_unknown_path_is_told_so(stage: Stage) -> None:
    for path in ("/v1/nothing", "/nothing", "/v1/messages/x/y"):
        status, answer = await stage.client.post(path, {})
        assert status == 404
        assert path in answer["error"]["message"]


async def test_the_api_describes_itself(stage: Stage) -> None:
    async with stage.client.session.get(f"{stage.client.url}/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert {CHAT, "/v1/messages", "/v1/responses", "/v1/completions"} <= paths.keys()
    async with stage.client.session.get(f"{stage.client.url}/docs") as response:
        assert "/v1/messages" in await response.text()


async def test_a_prompt_comes_back_from_its_tokens(stage: Stage) -> None:
    status, made = await stage.client.post("/v1/tokenize", {"model": MODEL, "prompt": "Hi 🧿"})
    assert status == 200
    assert made["count"] == len(made["tokens"])
    status, text = await stage.client.post(
        "/v1/detokenize", {"model": MODEL, "tokens": made["tokens"]}
    )
    assert text == {"prompt": "Hi 🧿"}


async def test_unknown_fields_are_accepted(stage: Stage) -> None:
    pending = asyncio.create_task(stage.client.post(CHAT, body(whatever={"a": [1]}, stop=None)))
    work = await stage.a.work()
    await stage.a.send(work, Chunk(work.request, 0, [300], finish="stop"))
    assert (await pending)[0] == 200


async def test_the_frontend_tells_its_state(stage: Stage) -> None:
    async with stage.client.session.get(f"{stage.client.url}/v1/models") as response:
        assert [m["id"] for m in (await response.json())["data"]] == [MODEL]
    for path, status in [(f"/v1/models/{MODEL}", 200), ("/v1/models/x", 404), ("/live", 200)]:
        async with stage.client.session.get(stage.client.url + path) as response:
            assert response.status == status
    assert stage.mesh.metric("kvmesh_frontend_active_requests") == 0


async def test_a_body_that_is_not_what_its_headers_say_is_no_defect(stage: Stage) -> None:
    status, answer = await stage.client.post(
        "/v1/messages", b"\x1f\x8bnothing", **{"Content-Encoding": "gzip"}
    )
    assert status == 400
    assert answer["error"]["message"] == "The body is not valid gzip data."
    await eventually(lambda: stage.mesh.metric("kvmesh_frontend_active_requests") == 0)
    assert "Traceback" not in stage.mesh.logs()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/messages/batches/nothing", {}),
        ("/v1/models/nobody", {"anthropic-version": "2023-06-01"}),
        ("/v1/files/nothing", {"anthropic-version": "2023-06-01"}),
        ("/v1/files/nothing", {}),
        ("/v1/models/nobody", {}),
    ],
)
async def test_what_is_not_there_is_told_as_the_client_reads_it(
    stage: Stage, path: str, headers: dict[str, str]
) -> None:
    async with stage.client.session.get(stage.client.url + path, headers=headers) as response:
        assert response.status == 404
        answer = await response.json()
    anthropic = path.startswith("/v1/messages") or "anthropic-version" in headers
    assert (answer.get("type") == "error") == anthropic
    assert answer["error"]["type"] == ("not_found_error" if anthropic else "invalid_request_error")


@pytest.fixture
def second(stage: Stage, tmp_path: Path) -> Iterator[Mesh]:
    """Another frontend of the same mesh, on its own port."""
    mesh = Mesh(stage.mesh.nats_url, tmp_path, SETTINGS, stage.mesh.namespace)
    mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_DRAIN_TIMEOUT_S="1")
    yield mesh
    mesh.stop()


async def test_a_frontend_that_stops_says_so_on_every_stream(stage: Stage, second: Mesh) -> None:
    await second.ready()
    client = Client(second.url, stage.client.session)
    chat = await client.stream(CHAT, body(stream=True))
    messages = await client.stream("/v1/messages", body(stream=True, max_tokens=9))
    plain = asyncio.create_task(client.post(CHAT, body()))
    for number in range(3):
        work = await stage.a.work(number)
        await stage.a.send(work, Chunk(work.request, 0, ids("One")))
    second.processes["frontend-1"].terminate()
    message = "The server is stopping."
    assert (await events(chat))[-2]["error"]["message"] == message
    assert (await events(messages))[-1]["error"]["message"] == message
    status, answer = await plain
    assert (status, answer["error"]["message"]) == (503, message)
    assert await asyncio.to_thread(second.processes["frontend-1"].wait, PATIENCE_S) == 0


async def test_a_frontend_that_answers_knows_the_models(stage: Stage, second: Mesh) -> None:

    async def first_answer() -> int | None:
        try:
            async with stage.client.session.get(f"{second.url}/v1/models/{MODEL}") as response:
                return response.status
        except aiohttp.ClientConnectionError:
            return None

    assert await eventually(first_answer) == 200
