"""A mesh as clients, boards and operators of NVIDIA Dynamo use it; and budgets of thinking."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support import apis
from support.apis import CHAT, MESSAGES, RESPONSES, Api, streamed
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
THOUGHT = 90  # tokens of the mock engine's thinking
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Client]:
    env = {
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_MOCK_REASONING_TOKENS": str(THOUGHT),
        "KVMESH_FRONTEND_METRICS_COMPAT": "dynamo",
    }
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("dynamo"), env)
    mesh.start_all(workers=2)
    await mesh.ready()
    async with client_session() as session:
        yield Client(mesh.url, session)
    mesh.stop()


def bounded(api: Api, limit: int) -> dict[str, Any]:
    """The field with which an API bounds the thinking."""
    if api is MESSAGES:
        return {"thinking": {"type": "enabled", "budget_tokens": limit}}
    return {"thinking_token_budget": limit} if api is CHAT else nvext(max_thinking_tokens=limit)


def nvext(**fields: Any) -> dict[str, Any]:
    return {"nvext": fields}


def thinking_tokens(answer: Any) -> int:
    usage = answer["usage"]
    for name in ("completion_tokens_details", "output_tokens_details"):
        found = usage.get(name, {})
        for key in ("reasoning_tokens", "thinking_tokens"):
            if key in found:
                return int(found[key])
    raise AssertionError(usage)


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
@pytest.mark.parametrize("limit", [1, 7, 60])
async def test_thinking_ends_at_its_budget(client: Client, api: Api, limit: int) -> None:
    body = api.body(f"Think about {limit}.", 400, **bounded(api, limit))
    status, answer = await client.post(api.path, body)
    assert status == 200
    assert thinking_tokens(answer) == limit
    content = api.whole(answer)
    assert content.thinking
    assert content.text


@streamed
@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=lambda api: api.name)
async def test_thinking_below_its_budget_is_left_alone(
    client: Client, api: Api, stream: bool
) -> None:
    plain = api.body("Think as you like.", 400, stream=stream)
    wide = {**plain, **bounded(api, THOUGHT + 1)}
    assert (await api.send(client, wide)).thinking == (await api.send(client, plain)).thinking


async def test_an_answer_of_a_schema_follows_thinking_that_was_ended(client: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = CHAT.body("An object.", 400, response_format=form, **bounded(CHAT, 5))
    status, answer = await client.post(CHAT.path, body)
    assert status == 200
    assert thinking_tokens(answer) <= 5
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["a"], int)


async def test_a_worker_is_chosen_by_the_number_in_an_earlier_answer(client: Client) -> None:
    wish = nvext(extra_fields=["worker_id"])
    for number in range(4):
        _, first = await client.post(CHAT.path, CHAT.body(f"Hello {number}", 4, **wish))
        told = first["nvext"]["worker_id"]
        header = {"x-worker-instance-id": str(told["decode_worker_id"])}
        echoed = {**header, "x-prefill-instance-id": str(told["prefill_worker_id"])}
        for sent in (header, echoed):
            body = CHAT.body(f"Others {number}", 4, **wish)
            status, again = await client.post(CHAT.path, body, **sent)
            assert status == 200
            assert again["nvext"]["worker_id"]["instance"] == told["instance"]
    status, refused = await client.post(
        CHAT.path, CHAT.body("Hi", 4), **{"x-worker-instance-id": "3"}
    )
    assert (status, refused["error"]["code"]) == (400, "constraint_unmet")


async def test_a_taint_that_no_worker_has_is_named(client: Client) -> None:
    wanted = {"routing_constraints": {"required_taints": ["fast"]}}
    status, refused = await client.post(CHAT.path, CHAT.body("Hi", 4, nvext=wanted))
    assert status == 503
    assert "no worker has the taint 'fast'" in refused["error"]["message"]


async def test_busy_thresholds_are_set_while_the_mesh_serves(client: Client) -> None:
    path = "/busy_threshold"

    async def shown() -> Any:
        async with client.session.get(client.url + path) as response:
            return (await response.json())["thresholds"]

    none = {
        "model": MODEL,
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": None,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert await shown() == [none]
    asked = {"model": MODEL, "active_prefill_tokens_threshold": 5000}
    assert await client.post(path, asked) == (200, none | asked)
    more = {"model": MODEL, "active_decode_blocks_threshold": 0.5}
    assert await client.post(path, more) == (200, none | asked | more)
    assert await shown() == [none | asked | more]
    for wrong, status in (
        ({"model": "nobody"}, 404),
        ({"model": MODEL, "active_decode_blocks_threshold": 2}, 400),
        ({"model": MODEL, "active_prefill_tokens_threshold_frac": 0.5}, 400),
    ):
        assert (await client.post(path, wrong))[0] == status


async def test_health_and_metrics_have_the_names_of_dynamo(client: Client) -> None:
    await apis.CHAT.send(client, CHAT.body("Count me.", 4))

    async def text(path: str) -> str:
        async with client.session.get(client.url + path) as response:
            return await response.text()

    assert json.loads(await text("/health"))["status"] == "healthy"
    assert json.loads(await text("/live"))["status"] == "live"
    label = f'{{model="{MODEL}"}}'

    async def idle() -> bool:
        return f"dynamo_frontend_inflight_requests{label} 0.0" in await text("/metrics")

    await eventually(idle, what="no request runs")
    found = await text("/metrics")
    for name in (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum",
        "request_duration_seconds_count",
        "input_sequence_tokens_sum",
        "output_sequence_tokens_count",
        "queued_requests",
        "output_tokens_total",
        "model_context_length",
    ):
        assert f"dynamo_frontend_{name}{label}" in found
    assert 'endpoint="chat_completions",error_type="",model=' in found
