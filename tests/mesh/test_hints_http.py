"""Hints and retention of every API: from the request to router, worker and response."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.apis import (
    APIS,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Api,
    Content,
    every_api,
    streamed,
)
from support.frontend import (
    LIMITS,
    TOKENIZER,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    client_session,
    frontend_mesh,
    ids,
    scripted_router,
    scripted_worker,
)
from support.mesh import stream_env
from support.nats import NatsServer

from kvmesh.bus.messages import (
    Candidate,
    Chunk,
    Decision,
    Placement,
    Retain,
    Routed,
    RouteReply,
    RouteRequest,
    Work,
    instance_number,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS: dict[str, dict[str, Any]] = {
    "router": {"scopes": ["routing"], "max_priority": 10},
    "plain": {"max_priority": 2, "max_latency_sensitivity": 0.25},
    "humble": {},
}
SAID = "Good day to you."
TEXT = "Please read the files and say what you find. " * 8
Json = dict[str, Any]


def candidate(instance: str, cost: float) -> Candidate:
    return Candidate(
        instance=instance,
        worker=instance[0],
        rank=1,
        overlap=[2],
        prefill=3.0,
        decode=4.0,
        requests=5,
        cost=cost,
    )


class ExplainingRouter(ScriptedRouter):
    """Routes to rank 1 of the first worker, with a decision."""

    def choose(self, request: RouteRequest) -> RouteReply:
        reply = super().choose(request)
        if not isinstance(reply, Routed):
            return reply
        chosen, rejected = candidate(reply.instance, 7.0), candidate("z-1", 9.0)
        decision = Decision(
            request=request.request,
            model=request.model,
            time=0.0,
            router="router-1",
            policy=request.policy or "kv",
            chosen=chosen,
            candidates=[chosen, candidate("y-1", 11.0), rejected],
            tokens=request.tokens,
            sequence_hashes=b"",
            max_tokens=request.max_tokens,
            wait_s=0.25,
            index_s=0.002,
        )
        explained = decision if request.explain else None
        return Routed(instance=reply.instance, rank=1, overlap=[2], decision=explained)


@dataclass
class Stage:
    """One frontend with keys, a router that explains, and two workers; `a` is preferred."""

    client: Client
    router: ScriptedRouter
    a: ScriptedWorker
    b: ScriptedWorker

    async def send(
        self,
        api: Api,
        body: Json,
        key: str = "router",
        chunk: Json | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[RouteRequest, Work, Content]:
        """A request that `a` answers with SAID: (route request, work, response)."""
        works, route_request = len(self.a.works), len(self.router.requests)
        response = asyncio.create_task(api.send(self.client, body, **bearer(key), **headers))
        try:
            work = await self.a.work(works)
        except TimeoutError:
            await response  # fails with the reason of a refusal
            raise
        first = {"cached": [16, 8], "finish": "stop", **(chunk or {})}
        await self.a.send(work, Chunk(work.request, 0, ids(SAID), **first))
        content = await response
        return self.router.requests[route_request], work, content

    async def refusal(self, api: Api, body: Json, key: str) -> tuple[int, Any]:
        return await self.client.post(api.path, body, **bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("hints")
    keys = folder / "keys.toml"
    rows = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **fields}
        for name, fields in KEYS.items()
    ]
    tables = ("".join(f"{k} = {json.dumps(v)}\n" for k, v in row.items()) for row in rows)
    keys.write_text("".join(f"[[key]]\n{table}" for table in tables))
    settings = {"KVMESH_FRONTEND_KEYS_FILE": str(keys), **stream_env(LIMITS)}
    router = ExplainingRouter()
    async with (
        frontend_mesh(nats_server.url, folder, settings) as (mesh, bus),
        scripted_router(bus, LIMITS, router),
        scripted_worker(bus, LIMITS, "a") as a,
        scripted_worker(bus, LIMITS, "b") as b,
        client_session() as session,
    ):
        await mesh.ready()
        yield Stage(Client(mesh.url, session), router, a, b)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    shared.router.order = [shared.a.instance, shared.b.instance]
    shared.router.requests.clear()
    for worker in (shared.a, shared.b):
        worker.status = "accepted"
        worker.works.clear()
    return shared


# --- hints of agents ---


@every_api
async def test_agent_hints_reach_router_and_worker(stage: Stage, api: Api) -> None:
    hints = {"priority": 7, "strict_priority": 3, "latency_sensitivity": 0.5, "osl": 77}
    control = {"session_id": "child", "action": "bind"}
    body = api.body(TEXT, 9, nvext={"agent_hints": hints, "session_control": control})
    route_request, work, _ = await stage.send(api, body)
    found = route_request.hints
    assert (found.priority, found.strict_priority) == (7, 3)
    assert (found.latency_sensitivity, found.osl) == (0.5, 77)
    assert (found.session, found.parent_session, found.session_final) == ("child", None, False)
    assert (route_request.tokens, route_request.max_tokens) == (len(work.tokens) // 4, 9)
    assert (work.priority, work.session, work.rank) == (7, "child", 1)


@every_api
async def test_without_hints_router_and_worker_get_the_defaults(stage: Stage, api: Api) -> None:
    route_request, work, content = await stage.send(api, api.body(TEXT, 9))
    hints = route_request.hints
    assert (hints.priority, hints.strict_priority, hints.latency_sensitivity) == (0, 0, 0.0)
    assert (hints.osl, hints.parent_session, hints.session_final) == (None, None, False)
    assert (route_request.placement, route_request.policy, route_request.overrides) == (
        Placement(),
        None,
        {},
    )
    assert (work.priority, work.decode, content.nvext) == (0, None, None)
    assert not [entry for entry in work.retention if entry.explicit]


@every_api
@pytest.mark.parametrize("prefix", ["x-kvmesh", "x-dynamo"])
async def test_headers_override_hints_of_the_body(stage: Stage, api: Api, prefix: str) -> None:
    hints = {"priority": 1, "strict_priority": 1, "osl": 1}
    control = {"session_id": "of-the-body"}
    body = api.body(TEXT, 9, nvext={"agent_hints": hints, "session_control": control})
    names = {
        "priority": "5",
        "strict-priority": "4",
        "osl": "33",
        "session-id": "child",
        "parent-session-id": "parent",
        "session-final": "true",
        "policy": "random",
        "dp-rank": "1",
        "worker-instance-id": "a-1",
    }
    headers = {f"{prefix}-{name}": value for name, value in names.items()}
    route_request, work, _ = await stage.send(api, body, headers=headers)
    found = route_request.hints
    assert (found.priority, found.strict_priority, found.osl) == (5, 4, 33)
    assert (found.session, found.parent_session, found.session_final) == ("child", "parent", True)
    assert (route_request.policy, route_request.placement) == (
        "random",
        Placement(instance="a-1", rank=1),
    )
    assert (work.priority, work.session, work.parent_session) == (5, "child", "parent")


HARNESSES: list[tuple[dict[str, str], str, str | None]] = [
    ({"x-claude-code-session-id": "s"}, "s", None),
    ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "s/a", "s"),
    (
        {
            "x-claude-code-session-id": "s",
            "x-claude-code-agent-id": "a",
            "x-claude-code-parent-agent-id": "b",
        },
        "s/a",
        "s/b",
    ),
    ({"thread-id": "t", "session-id": "s", "x-codex-parent-thread-id": "p"}, "t", "p"),
    ({"session-id": "s"}, "s", None),
    ({"x-session-id": "s", "x-session-affinity": "x", "x-parent-session-id": "p"}, "s", "p"),
    ({"x-session-affinity": "x"}, "x", None),
    ({"x-kvmesh-session-id": "k", "thread-id": "t", "x-codex-parent-thread-id": "p"}, "k", None),
]


@pytest.mark.parametrize(("headers", "session", "parent"), HARNESSES)
async def test_the_session_of_every_harness_reaches_router_and_worker(
    stage: Stage, headers: dict[str, str], session: str, parent: str | None
) -> None:
    route_request, work, _ = await stage.send(CHAT, CHAT.body(TEXT, 9), headers=headers)
    assert (route_request.hints.session, route_request.hints.parent_session) == (session, parent)
    assert (work.session, work.parent_session) == (session, parent)


BODIES: list[tuple[Api, Json]] = [
    (CHAT, {"prompt_cache_key": "named"}),
    (COMPLETIONS, {"prompt_cache_key": "named"}),
    (RESPONSES, {"prompt_cache_key": "named"}),
    (MESSAGES, {"metadata": {"user_id": '{"session_id": "named"}'}}),
]


@pytest.mark.parametrize(("api", "fields"), BODIES, ids=[api.name for api, _ in BODIES])
async def test_the_api_s_own_field_names_the_session(stage: Stage, api: Api, fields: Json) -> None:
    route_request, work, _ = await stage.send(api, api.body(TEXT, 9, **fields))
    assert route_request.hints.session == work.session == "named"
    nvext = {"session_control": {"session_id": "controlled", "action": "close"}}
    route_request, work, _ = await stage.send(api, api.body(TEXT, 9, **fields, nvext=nvext))
    assert route_request.hints.session == work.session == "controlled"
    assert route_request.hints.session_final


CAPS: list[tuple[str, int, int, float]] = [
    ("router", 10, 10, 0.9),
    ("plain", 2, 2, 0.25),
    ("humble", 0, 0, 0.0),
]


@every_api
@pytest.mark.parametrize(("key", "priority", "strict", "latency"), CAPS)
async def test_a_key_bounds_hints(
    stage: Stage, api: Api, key: str, priority: int, strict: int, latency: float
) -> None:
    hints = {"priority": 99, "strict_priority": 88, "latency_sensitivity": 0.9}
    body = api.body(TEXT, 9, nvext={"agent_hints": hints})
    route_request, work, _ = await stage.send(api, body, key)
    found = route_request.hints
    assert (found.priority, found.strict_priority) == (priority, strict)
    assert found.latency_sensitivity == latency
    assert work.priority == priority
    lower = api.body(TEXT, 9, nvext={"agent_hints": {"priority": -4}})
    route_request, work, _ = await stage.send(api, lower, key)
    assert route_request.hints.priority == work.priority == -4


# --- placement ---

STEERING: list[tuple[Json, Json]] = [
    ({"policy": "random"}, {"policy": "random"}),
    ({"router_config_override": {"prefill_weight": 2.5}}, {"overrides": {"prefill_weight": 2.5}}),
    ({"backend_instance_id": "a-1"}, {"placement": Placement(instance="a-1")}),
    ({"backend_instance_id": 17}, {"placement": Placement(instance="17")}),
    (
        {"backend_instance_id": instance_number("a-1")},
        {"placement": Placement(instance="a-1")},
    ),
    ({"decode_worker_id": "a-1"}, {"placement": Placement(instance="a-1")}),
    ({"prefill_worker_id": "a-1"}, {"placement": Placement(prefill="a-1")}),
    ({"dp_rank": 1}, {"placement": Placement(rank=1)}),
    ({"routing_constraints": {"allow": ["a-1"]}}, {"placement": Placement(allow=["a-1"])}),
    ({"routing_constraints": {"exclude": ["b-1"]}}, {"placement": Placement(exclude=["b-1"])}),
]


@every_api
@pytest.mark.parametrize(("nvext", "expected"), STEERING)
async def test_placement_needs_the_scope_routing(
    stage: Stage, api: Api, nvext: Json, expected: Json
) -> None:
    body = api.body(TEXT, 9, nvext=nvext)
    route_request, _, _ = await stage.send(api, body)
    for name, value in expected.items():
        assert getattr(route_request, name) == value
    status, answer = await stage.refusal(api, body, "plain")
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert "routing" in answer["error"]["message"]
    assert len(stage.router.requests) == len(stage.a.works) == 1


@every_api
async def test_labels_need_no_scope(stage: Stage, api: Api) -> None:
    nvext = {"routing_constraints": {"labels": {"zone": "north"}}}
    route_request, _, _ = await stage.send(api, api.body(TEXT, 9, nvext=nvext), "humble")
    assert route_request.placement == Placement(labels={"zone": "north"})


@every_api
@streamed
async def test_busy_workers_make_an_overload(stage: Stage, api: Api, stream: bool) -> None:
    stage.a.status = stage.b.status = "busy"
    body = api.body(TEXT, 9, stream=stream)
    response = await stage.client.stream(api.path, body, **bearer("plain"))
    assert response.status == (529 if api is MESSAGES else 429)
    assert response.headers["Retry-After"] == "2"
    assert (await response.json())["error"]["type"] == "overloaded_error"
    assert [sorted(route_request.placement.exclude) for route_request in stage.router.requests] == [
        [],
        ["a-1"],
        ["a-1", "b-1"],
    ]


# --- fields of the response ---


@every_api
@streamed
async def test_every_extra_field_is_in_the_response(stage: Stage, api: Api, stream: bool) -> None:
    fields = ["worker_id", "timing", "cache", "routing", "stop_reason", "ignored"]
    fields += ["detailed_finish_reason", "completion_token_ids"]
    nvext = {
        "extra_fields": [*fields, "routed_experts"],
        "agent_hints": {"priority": 1, "unheard_of": True},
        "annotations": ["x"],
        "strange": 1,
    }
    body = api.body(TEXT, 9, stream=stream, nvext=nvext, zebra=1, aardvark=2)
    _, work, content = await stage.send(api, body)
    found = content.nvext
    assert found is not None
    assert sorted(found) == sorted(fields)
    number = instance_number("a-1")
    assert found["worker_id"] == {
        "instance": "a-1",
        "dp_rank": 1,
        "prefill_worker_id": number,
        "prefill_dp_rank": 1,
        "decode_worker_id": number,
        "decode_dp_rank": 1,
    }
    timing = found["timing"]
    assert 0 <= timing["ttft_ms"] <= timing["total_ms"] == timing["total_time_ms"]
    parts = timing["prefill_wait_time_ms"] + timing["prefill_time_ms"]
    assert parts == pytest.approx(timing["ttft_ms"], abs=0.01)
    assert timing["kv_hit_rate"] == pytest.approx(24 / (len(work.tokens) // 4), abs=1e-5)
    assert found["completion_token_ids"] == ids(SAID)
    account = found["cache"].pop("account")
    reused, lost = account["reused"].values(), [loss["tokens"] for loss in account["lost"]]
    assert sum([*reused, *lost, account["new"]]) == len(work.tokens) // 4
    assert found["cache"] == {
        "cached_tokens": 24,
        "tiers": [16, 8],
        "prompt_tokens": len(work.tokens) // 4,
        "retention": [],
    }
    assert found["stop_reason"] == "stop"
    hint = "nvext.agent_hints.unheard_of"
    ignored = [hint, "nvext.annotations[0]", "nvext.extra_fields[8]", "nvext.strange"]
    assert found["ignored"] == ["aardvark", "zebra", *ignored]
    routing = found["routing"]
    assert (routing["policy"], routing["wait_ms"], routing["index_ms"]) == ("kv", 250.0, 2.0)
    assert routing["chosen"] == msgspec.structs.asdict(candidate("a-1", 7.0))
    assert routing["best_rejected"]["instance"] == "z-1"


@every_api
@streamed
@pytest.mark.parametrize(
    "fields", [["worker_id"], ["timing"], ["cache"], ["routing"], ["stop_reason"], ["ignored"], []]
)
async def test_only_requested_fields_are_in_the_response(
    stage: Stage, api: Api, stream: bool, fields: list[str]
) -> None:
    nvext = {"extra_fields": fields}
    route_request, _, content = await stage.send(api, api.body(TEXT, 9, stream=stream, nvext=nvext))
    assert list(content.nvext or {}) == fields
    assert route_request.explain == ("routing" in fields)


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=lambda api: api.name)
async def test_a_stream_names_its_worker_first_and_has_no_chunk_without_choices(
    stage: Stage, api: Api
) -> None:
    nvext = {"extra_fields": ["worker_id", "timing"], "annotations": ["formatted_prompt"]}
    body = api.body(
        TEXT, 9, stream=True, nvext=nvext, stream_options={"continuous_usage_stats": True}
    )
    sent = asyncio.create_task(stage.client.stream(api.path, body, **bearer("plain")))
    work = await stage.a.work(0)
    await stage.a.send(work, Chunk(work.request, 0, ids(SAID), finish="stop"))
    lines = (await (await sent).text()).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[0]["nvext"]["worker_id"]["decode_worker_id"] == instance_number("a-1")
    assert sorted(chunks[-1]["nvext"]) == ["timing", "worker_id"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == len(ids(SAID))
    at = lines.index("event: formatted_prompt")
    assert TEXT in json.loads(lines[at + 1].removeprefix(": "))


STOPPED: list[tuple[Api, str, str]] = [
    (CHAT, "stop", "stop"),
    (COMPLETIONS, "stop", "stop"),
    (MESSAGES, "stop_sequences", "stop_sequence"),
]


@streamed
@pytest.mark.parametrize(("api", "field", "finish"), STOPPED, ids=[a.name for a, _, _ in STOPPED])
async def test_a_stop_string_is_the_stop_reason(
    stage: Stage, api: Api, field: str, finish: str, stream: bool
) -> None:
    nvext = {"extra_fields": ["stop_reason"]}
    body = api.body(TEXT, 99, stream=stream, nvext=nvext, **{field: ["never", " to y"]})
    _, work, content = await stage.send(api, body)
    assert work.sampling.stop == ["never", " to y"]
    assert (content.text, content.finish) == ("Good day", finish)
    assert content.nvext == {"stop_reason": " to y"}


# --- retention ---

RANGES = [
    {"start": 0, "end": 16, "priority": 90, "duration_s": 60},
    {"start": 16, "priority": 10},
]
DECODE = {"priority": 20, "duration_s": 5}


@every_api
@streamed
async def test_retention_ranges_reach_the_worker_and_outcomes_the_caller(
    stage: Stage, api: Api, stream: bool
) -> None:
    retention = {"ranges": RANGES, "decode": DECODE}
    nvext = {"retention": retention, "extra_fields": ["cache"]}
    chunk = {"retention": ["honoured", "clipped"], "decode": "unsupported"}
    body = api.body(TEXT, 9, stream=stream, nvext=nvext)
    _, work, content = await stage.send(api, body, chunk=chunk)
    assert [entry for entry in work.retention if entry.explicit] == [
        Retain(0, 16, 90, 60.0, explicit=True),
        Retain(16, None, 10, None, explicit=True),
    ]
    assert work.decode == Retain(0, None, 20, 5.0, "decode", True)
    assert content.nvext is not None
    cache = content.nvext["cache"]
    assert cache["decode"] == {**DECODE, "outcome": "unsupported"}
    assert cache["retention"] == [
        {**RANGES[0], "outcome": "honoured"},
        {**RANGES[1], "end": None, "duration_s": None, "outcome": "clipped"},
    ]


WHOLE: list[tuple[Api, Json, float]] = [
    *[(api, {"nvext": {"cache_control": {"ttl": "2m"}}}, 120.0) for api in APIS],
    *[(api, {"nvext": {"cache_control": {}}}, 300.0) for api in APIS],
    (MESSAGES, {"cache_control": {"type": "ephemeral"}}, 300.0),
    (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600.0),
    *[
        (api, fields, ttl_s)
        for api in (CHAT, COMPLETIONS, RESPONSES)
        for fields, ttl_s in (
            ({"prompt_cache_retention": "24h"}, 86400.0),
            ({"prompt_cache_options": {"ttl": "90s"}}, 90.0),
            (
                {
                    "prompt_cache_retention": "1m",
                    "prompt_cache_options": {"mode": "explicit", "ttl": "9m"},
                },
                60.0,
            ),
        )
    ],
]


@pytest.mark.parametrize(("api", "fields", "ttl_s"), WHOLE)
async def test_a_mark_of_the_request_retains_the_whole_prompt(
    stage: Stage, api: Api, fields: Json, ttl_s: float
) -> None:
    nvext = {**fields.get("nvext", {}), "extra_fields": ["cache"]}
    body = api.body(TEXT, 9, **{**fields, "nvext": nvext})
    _, work, content = await stage.send(api, body, chunk={"retention": ["honoured"]})
    (mark,) = [entry for entry in work.retention if entry.explicit]
    assert (mark.start, mark.priority, mark.ttl_s) == (0, 75, ttl_s)
    assert mark.end in (None, len(work.tokens) // 4)
    assert content.nvext is not None
    (found,) = content.nvext["cache"]["retention"]
    assert (found["duration_s"], found["outcome"]) == (ttl_s, "honoured")


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES], ids=lambda api: api.name)
async def test_retention_in_memory_is_the_default(stage: Stage, api: Api) -> None:
    for value in ("in_memory", "in-memory"):
        body = api.body(TEXT, 9, prompt_cache_retention=value)
        _, work, _ = await stage.send(api, body)
        assert not [entry for entry in work.retention if entry.explicit]


def marked(api: Api, ttl: str | None) -> Json:
    """A request whose first of two parts has a breakpoint."""
    mark: Json = {"ttl": ttl} if ttl else {}
    if api is MESSAGES:
        first: Json = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", **mark}}
        return {"messages": [{"role": "user", "content": [first, {"type": "text", "text": "Hi"}]}]}
    kind = "input_text" if api is RESPONSES else "text"
    first = {"type": kind, "text": TEXT, "prompt_cache_breakpoint": mark}
    message = {"role": "user", "content": [first, {"type": kind, "text": "Hi"}]}
    return {"input": [message]} if api is RESPONSES else {"messages": [message]}


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
@pytest.mark.parametrize("ttl", [None, "1h"])
async def test_a_breakpoint_retains_the_prompt_up_to_it(
    stage: Stage, api: Api, ttl: str | None
) -> None:
    body = {**api.body("", 9), **marked(api, ttl), "nvext": {"extra_fields": ["cache"]}}
    _, work, content = await stage.send(api, body, chunk={"retention": ["clipped"]})
    (mark,) = [entry for entry in work.retention if entry.explicit]
    default = 300.0 if api is MESSAGES else 1800.0
    assert (mark.start, mark.priority, mark.ttl_s) == (0, 75, 3600.0 if ttl else default)
    assert mark.end is not None
    assert len(ids(TEXT)) <= mark.end < len(work.tokens) // 4
    kept = TOKENIZER.decode(memoryview(work.tokens).cast("I").tolist()[: mark.end])
    assert kept.rstrip().endswith(TEXT.rstrip())
    assert content.nvext is not None
    (found,) = content.nvext["cache"]["retention"]
    assert (found["end"], found["outcome"]) == (mark.end, "clipped")


BAD: list[tuple[Json, str]] = [
    ({"retention": [{"start": 8, "end": 8}]}, "retention"),
    ({"retention": [{"start": 0, "priority": 101}]}, "priority"),
    ({"retention": {"decode": {"duration_s": 0}}}, "duration_s"),
    ({"cache_control": {"ttl": "soon"}}, "ttl"),
    ({"agent_hints": {"latency_sensitivity": "high"}}, "latency_sensitivity"),
    ({"agent_hints": {"osl": "long"}}, "osl"),
    ({"session_control": {"session_id": "s", "action": "drop"}}, "action"),
    ({"cache_salt": "two words"}, "cache_salt"),
]


@every_api
@pytest.mark.parametrize(("nvext", "named"), BAD)
async def test_an_invalid_hint_is_named(stage: Stage, api: Api, nvext: Json, named: str) -> None:
    status, answer = await stage.refusal(api, api.body(TEXT, 9, nvext=nvext), "plain")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert named in answer["error"]["message"]
    assert not stage.router.requests
