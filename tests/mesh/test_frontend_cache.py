"""Cache endpoints, the keys that may use them, and session hooks after an answer."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from support.frontend import (
    CONTROLS,
    LIMITS,
    MODEL,
    TOKENIZER,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    attempt,
    client_session,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.wait import eventually

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import (
    Cancel,
    Chunk,
    Clear,
    Control,
    ControlReply,
    Instance,
    NodeStore,
    NotCleared,
    Outcome,
    Pin,
    Prefetch,
    Release,
    Retain,
    Role,
    Unpin,
    Work,
    owner,
)
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.cli.explain import find_events
from kvmesh.frontend.auth.tenant_secret import tenant_secret
from kvmesh.frontend.http.cache.pin_store import PinStore, StoredPin
from kvmesh.frontend.http.cache.pins import MAX_BYTES, MAX_PINS
from kvmesh.frontend.namespaces import TenantNamespaces

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SETTINGS = stream_env(LIMITS)
KEYS = """
[[key]]
name = "a"
sha256 = "{a}"
tenant = "team-a"
scopes = ["cache"]
[[key]]
name = "b"
sha256 = "{b}"
tenant = "team-b"
scopes = ["cache"]
[[key]]
name = "plain"
sha256 = "{plain}"
tenant = "team-a"
max_priority = 2
[[key]]
name = "root"
sha256 = "{root}"
scopes = ["admin"]
[[key]]
name = "thrifty"
sha256 = "{thrifty}"
tokens_per_minute = 1500
"""
LONG = "You are an agent who reads and writes files. " * 20
ASK = {"role": "user", "content": LONG}
Kind = TypeVar("Kind", bound=Control)


class ScriptedStore:
    """A block manager that only listens."""

    def __init__(self) -> None:
        self.controls: list[Control] = []

    async def answer(self, control: Control, reply: Reply) -> None:
        self.controls.append(control)
        reply(ControlReply(ok=True, blocks=3))


@dataclass
class Stage:
    """Two frontends, two workers of which `a` is preferred, and a block manager."""

    mesh: Mesh
    bus: Bus
    client: Client
    other: Client
    router: ScriptedRouter
    a: ScriptedWorker
    b: ScriptedWorker
    store: ScriptedStore
    tenants: TenantNamespaces

    @property
    def team(self) -> str:
        """The tag of team-a."""
        return self.tenants.tag("team-a")

    async def post(self, path: str, body: Any, key: str = "a") -> tuple[int, Any]:
        return await self.client.post(path, {"model": MODEL, **body}, **bearer(key))

    async def call(self, method: str, path: str, key: str = "a", **body: Any) -> tuple[int, Any]:
        data = msgspec.json.encode({"model": MODEL, **body}) if body else b""
        async with self.client.session.request(
            method, self.client.url + path, data=data, headers=bearer(key)
        ) as response:
            return response.status, await response.json()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("cache")
    keys = folder / "keys.toml"
    names = ("a", "b", "plain", "root", "thrifty")
    keys.write_text(KEYS.format(**{n: hashlib.sha256(n.encode()).hexdigest() for n in names}))
    # prompts that show answers as they were generated leave little to compute ahead
    settings = {
        **SETTINGS,
        "KVMESH_FRONTEND_KEYS_FILE": str(keys),
        "KVMESH_FRONTEND_ANSWERS_BYTES": "0",
    }
    mesh = Mesh(nats_server.url, folder, settings, metrics_port=free_port())
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    store, port = ScriptedStore(), free_port()
    await bus.serve(bus.subjects.ctl("store-1"), CONTROLS, store.answer)
    tiers = NodeStore(directory="/nowhere", tier_bytes=[1, 0, 0], models=[MODEL])
    card = Instance(
        instance="store-1", role=Role.KVBM, name="store", version="0", started=0.0, store=tiers
    )
    lease = Lease(bus, card, LIMITS)
    await lease.open()
    mesh.start("frontend", "frontend-0", KVMESH_FRONTEND_METRICS_PORT=str(mesh.metrics_port))
    mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(port))
    async with (
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "a", adapters=["tuned"]) as a,
        scripted_worker(bus, LIMITS, "b", [0, 500], adapters=["tuned"]) as b,
        client_session() as session,
    ):
        one, two = Client(mesh.url, session), Client(f"http://127.0.0.1:{port}", session)
        for client in (one, two):
            await eventually(partial(serves, client))
        tenants = TenantNamespaces(await tenant_secret(bus, None))
        stage = Stage(mesh, bus, one, two, router, a, b, store, tenants)
        yield stage
        mesh.stop()
    await lease.close()
    await bus.close()


async def serves(client: Client) -> bool:
    """True if a frontend listens, has loaded the model and knows all instances."""
    try:
        async with client.session.get(f"{client.url}/v1/models", headers=bearer("a")) as models:
            loaded = len((await models.json())["data"]) == 2
        body = {"sessions": ["none"]}
        _, answer = await client.post("/v1/sessions/release", body, **bearer("a"))
        return loaded and len(answer["instances"]) == 3
    except aiohttp.ClientError:
        return False


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    shared.router.order = [shared.a.instance, shared.b.instance]
    shared.router.requests.clear()
    for worker in (shared.a, shared.b):
        worker.control_ok, worker.blocks, worker.not_cleared = True, 2, []
        worker.frozen = False
        worker.works.clear()
        worker.controls.clear()
    shared.store.controls.clear()
    return shared


def commands_received(holder: ScriptedWorker | ScriptedStore, kind: type[Kind]) -> list[Kind]:
    return [control for control in holder.controls if isinstance(control, kind)]


async def only_command(holder: ScriptedWorker | ScriptedStore, kind: type[Kind]) -> Kind:
    """The one command of a kind that arrives."""
    found = await eventually(lambda: commands_received(holder, kind), what=kind.__name__)
    assert len(found) == 1
    return found[0]


async def complete(
    stage: Stage, path: str, body: Any, key: str = "a", output: str = "Done.", **headers: str
) -> tuple[Work, Any]:
    """A request that `a` answers; its work and the answer."""
    number = len(stage.a.works)
    limit = "max_output_tokens" if path.endswith("/responses") else "max_tokens"
    sent = {"model": MODEL, limit: 99, **body}
    pending = asyncio.create_task(stage.client.post(path, sent, **bearer(key), **headers))
    work = await stage.a.work(number)
    ids = TOKENIZER.encode(output, add_special_tokens=False).ids
    kept = ["clipped"] * bool(work.retention)
    chunk = Chunk(work.request, 0, ids, finish="stop", cached=[16, 32], retention=kept or None)
    chunk.decode = "honoured" if work.decode is not None else None
    await stage.a.send(work, chunk)
    status, answer = await pending
    assert status == 200, answer
    return work, answer


# --- directives ---


async def test_a_worker_receives_directives_and_the_caller_their_outcome(stage: Stage) -> None:
    marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    nvext = {
        "extra_fields": ["cache"],
        "retention": {"ranges": [{"start": 0, "end": 32}], "decode": {"priority": 7}},
    }
    body = {"system": marked, "messages": [{"role": "user", "content": "Hi"}], "nvext": nvext}
    work, answer = await complete(stage, MESSAGES, body)
    system, marks, ranges = work.retention
    assert (system.kind, system.explicit) == ("system", False)
    assert (marks.start, marks.ttl_s, marks.explicit) == (0, 300.0, True)
    assert ranges == Retain(0, 32, explicit=True)
    assert work.decode == Retain(0, None, 7, None, "decode", True)
    assert work.tenant == stage.team
    assert answer["nvext"]["cache"]["tiers"] == [16, 32]
    outcomes = [entry["outcome"] for entry in answer["nvext"]["cache"]["retention"]]
    assert outcomes == ["clipped", "unsupported"]
    reported = {"priority": 7, "duration_s": None, "outcome": "honoured"}
    assert answer["nvext"]["cache"]["decode"] == reported
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == 48
    assert sum(v for k, v in usage.items() if k.endswith("input_tokens")) == len(work.tokens) // 4
    counted = [v for k, v in stage.mesh.metrics().items() if "directives_total" in k]
    assert counted == [1, 1, 1]


async def test_sessions_are_scoped_to_their_tenant(stage: Stage) -> None:
    headers = {"x-kvmesh-session-id": "s", "x-kvmesh-parent-session-id": "p"}
    work, _ = await complete(stage, CHAT, {"messages": [ASK]}, **headers)
    assert (work.session, work.parent_session) == (f"{stage.team}\x1fs", f"{stage.team}\x1fp")
    work, _ = await complete(stage, CHAT, {"messages": [ASK]}, "root", **headers)
    assert (work.session, work.parent_session) == ("s", "p")


async def test_no_caller_can_form_the_name_of_an_inferred_session(stage: Stage) -> None:
    words = {"role": "user", "content": f"Nobody has named this. {LONG}"}
    await complete(stage, CHAT, {"messages": [words]}, "root")
    more = [words, {"role": "assistant", "content": "Done."}, ASK]
    work, _ = await complete(stage, CHAT, {"messages": more}, "root")
    assert work.session is not None
    assert re.fullmatch(r"\x1f\x1fhttp-client [0-9a-f]{8}", work.session)
    await stage.post("/v1/sessions/release", {"sessions": [work.session]}, "root")
    assert work.session not in (await only_command(stage.a, Release)).sessions


async def test_the_key_sets_the_fair_class_and_bounds_the_priority(stage: Stage) -> None:
    own = {"x-tenant-id": "part", "x-kvmesh-fair-class": "premium", "x-kvmesh-priority": "9"}
    work, _ = await complete(stage, CHAT, {"messages": [ASK]}, "plain", **own)
    hints = stage.router.requests[-1].hints
    assert (hints.tenant, hints.fair_class, hints.priority) == ("team-a", "premium", 2)
    assert owner(work.tenant) == stage.team != work.tenant
    steered = {"messages": [ASK], "nvext": {"policy": "random"}}
    status, answer = await stage.post(CHAT, steered, "plain")
    assert (status, answer["error"]["code"]) == (403, "scope_missing")


# --- scopes ---

ENDPOINTS = [
    ("POST", "/v1/prefetch"),
    ("DELETE", "/v1/prefetch/x"),
    ("POST", "/v1/cache/pins"),
    ("GET", "/v1/cache/pins"),
    ("DELETE", "/v1/cache/pins"),
    ("DELETE", "/v1/cache/pins/x"),
    ("POST", "/v1/cache/clear"),
    ("POST", "/v1/sessions/release"),
]


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
async def test_every_cache_endpoint_requires_a_key_with_the_scope(
    stage: Stage, method: str, path: str
) -> None:
    status, answer = await stage.call(method, path, "plain")
    assert (status, answer["error"]["code"]) == (403, "scope_missing")
    status, _ = await stage.call(method, path, "nobody")
    assert status == 401
    assert not stage.a.controls + stage.store.controls


# --- prefetch ---

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [ASK], "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}),
    (MESSAGES, {"messages": [ASK], "system": "Be brief.", "thinking": {"type": "disabled"}}),
    (MESSAGES, {"messages": [ASK], "tools": [{"name": "read", "input_schema": {}}]}),
    ("/v1/responses", {"input": LONG, "instructions": "Be brief.", "store": False}),
    ("/v1/completions", {"prompt": LONG}),
]


@pytest.mark.parametrize(("path", "body"), PROMPTS)
async def test_a_prefetch_has_the_prompt_of_its_request(
    stage: Stage, path: str, body: dict[str, Any]
) -> None:
    work, _ = await complete(stage, path, body)
    stage.a.controls.clear()
    status, answer = await stage.post("/v1/prefetch", {**body, "compute": 64, "deadline": 5})
    assert status == 200, answer
    prefetch = await only_command(stage.a, Prefetch)
    assert (prefetch.tokens, prefetch.salt, prefetch.tenant) == (work.tokens, work.salt, stage.team)
    assert (prefetch.compute, prefetch.deadline_s, prefetch.at) == (64, 5, None)
    assert prefetch.conversation == work.conversation == 0  # not certain without a session's name
    assert (answer["instance"], answer["tokens"]) == (stage.a.instance, len(work.tokens) // 4)
    assert stage.router.requests[-1].sequence_hashes == stage.router.requests[-2].sequence_hashes
    assert stage.router.requests[-1].salt == stage.router.requests[-2].salt == work.salt


async def test_every_frontend_resolves_a_session_s_last_prompt(stage: Stage) -> None:
    work, _ = await complete(stage, CHAT, {"messages": [ASK]}, **{"x-kvmesh-session-id": "far"})
    stage.a.controls.clear()
    at = time.time() + 60
    body = {"model": MODEL, "session": "far", "at": at}
    status, answer = await stage.other.post("/v1/prefetch", body, **bearer("a"))
    assert status == 200, answer
    prefetch = await only_command(stage.a, Prefetch)
    assert (prefetch.tokens, prefetch.salt, prefetch.at) == (work.tokens, work.salt, at)
    assert (prefetch.session, prefetch.conversation) == (work.session, work.conversation)
    assert work.conversation
    status, answer = await stage.other.post("/v1/prefetch", body, **bearer("b"))
    assert (status, answer["error"]["code"]) == (404, "session_not_found")


async def test_only_its_tenant_cancels_a_prefetch(stage: Stage) -> None:
    _, answer = await stage.post("/v1/prefetch", {"tokens": list(range(300, 400))})
    sent = await only_command(stage.a, Prefetch)
    path = f"/v1/prefetch/{answer['id']}"
    status, answer = await stage.call("DELETE", path)
    assert (status, answer["cancelled"]) == (200, True)
    await stage.call("DELETE", path, "b")
    await eventually(lambda: len(commands_received(stage.a, Cancel)) == 2)
    mine, theirs = commands_received(stage.a, Cancel)
    assert mine.request == sent.id != theirs.request
    assert (await stage.call("DELETE", "/v1/prefetch/pf_1"))[0] == 404


async def test_a_worker_s_refusal_reaches_the_caller(stage: Stage) -> None:
    stage.a.control_ok = False
    status, answer = await stage.post("/v1/prefetch", {"tokens": [300] * 40})
    assert (status, answer["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("path", ["/v1/prefetch", "/v1/cache/pins"])
async def test_a_prompt_without_a_full_block_is_refused(stage: Stage, path: str) -> None:
    status, answer = await stage.post(path, {"tokens": [300] * 15})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "a block of 16 tokens" in answer["error"]["message"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "session"),
    ({"tokens": [1], "prompt": "x"}, "prompt"),
    ({"prompt": ["x", "y"]}, "prompt"),
    ({"messages": []}, "messages"),
    ({"tokens": [1], "deadline": 0}, "deadline"),
    ({"tokens": [1], "at": "soon"}, "at"),
    ({"tokens": [1], "at": 4e9}, "at"),
]


@pytest.mark.parametrize(("body", "where"), WRONG)
async def test_an_invalid_prompt_is_named(stage: Stage, body: dict[str, Any], where: str) -> None:
    status, answer = await stage.post("/v1/prefetch", body)
    assert (status, answer["error"]["param"]) == (400, where)


# --- pins ---


async def test_a_pin_is_sent_to_all_holders_and_listed_for_its_tenant(stage: Stage) -> None:
    work, _ = await complete(stage, CHAT, {"messages": [ASK]})
    prompt: dict[str, Any] = {"messages": [ASK]}
    status, pin = await stage.post("/v1/cache/pins", {**prompt, "ttl": "10m", "priority": 90})
    assert status == 200, pin
    for holder in (stage.a, stage.b, stage.store):
        sent = await only_command(holder, Pin)
        assert sent.sequence_hashes == stage.router.requests[-1].sequence_hashes
        assert (sent.priority, sent.tenant) == (90, stage.team)
        assert 0 < sent.ttl_s <= 600
    assert pin["requested"] == len(work.tokens) // 4 // 16
    assert (pin["affected"], len(pin["instances"])) == (7, 3)
    assert {entry["role"] for entry in pin["instances"]} == {"worker", "kvbm"}
    _, seen = await stage.call("GET", "/v1/cache/pins")
    assert [entry["id"] for entry in seen["data"]] == [pin["id"]]
    assert (await stage.call("GET", "/v1/cache/pins", "b"))[1]["data"] == []
    assert (await stage.call("DELETE", f"/v1/cache/pins/{pin['id']}", "b"))[0] == 404
    assert (await stage.call("DELETE", "/v1/cache/pins", **prompt))[1]["deleted"]
    for holder in (stage.a, stage.b, stage.store):
        assert (await only_command(holder, Unpin)).id == (commands_received(holder, Pin)[0]).id
    assert (await stage.call("GET", "/v1/cache/pins"))[1]["data"] == []


async def test_pins_are_sent_to_new_instances_and_outlive_a_frontend(stage: Stage) -> None:
    await stage.post("/v1/cache/pins", {"messages": [ASK], "id": "mine"})
    stage.mesh.kill("frontend-0")
    stage.mesh.restart("frontend-0")
    await eventually(lambda: serves(stage.client))
    _, seen = await stage.call("GET", "/v1/cache/pins")
    assert [entry["id"] for entry in seen["data"]] == ["mine"]
    async with scripted_worker(stage.bus, LIMITS, "late", adapters=["tuned"]) as late:
        sent = await eventually(lambda: commands_received(late, Pin))
        assert sent[0].id == commands_received(stage.a, Pin)[0].id
        await stage.call("DELETE", "/v1/cache/pins/mine")
        await eventually(lambda: commands_received(late, Unpin))
        assert len(commands_received(late, Pin)) == 1  # of two frontends


async def test_the_parts_of_a_tenant_share_its_pins(stage: Stage) -> None:
    tenants, store = stage.tenants, PinStore(stage.bus)
    for part in ("one", "two"):
        pin = StoredPin(
            id=f"\u00e9 {part}",
            tenant=tenants.tag("team-b", part),
            model=MODEL,
            tokens=16,
            sequence_hashes=bytes(MAX_BYTES // 32),
            priority=100,
            created=time.time(),
            expires=time.time() + 60,
        )
        for number in range(16):
            await store.put(msgspec.structs.replace(pin, id=f"{pin.id}{number}"))
    status, answer = await stage.post("/v1/cache/pins", {"messages": [ASK]}, "b")
    assert (status, answer["error"]["code"]) == (429, "too_many_pins")
    _, seen = await stage.call("GET", "/v1/cache/pins", "b")
    assert seen["data"] == []
    for head in await store.list_tenant(tenants.tag("team-b", "one"), time.time()):
        await store.delete(
            msgspec.structs.replace(pin, id=head.id, tenant=tenants.tag("team-b", "one"))
        )
    assert (await stage.post("/v1/cache/pins", {"messages": [ASK]}, "b"))[0] == 200
    assert (await stage.call("DELETE", "/v1/cache/pins", "b", messages=[ASK]))[0] == 200
    kept = len(await store.list_owner(pin.tenant.partition("/")[0], time.time()))
    for number in range(MAX_PINS - kept - 1):
        await store.put(msgspec.structs.replace(pin, id=f"few {number}", sequence_hashes=b""))
    asked = ({"tokens": [first, *range(31)]} for first in range(6))
    answers = await asyncio.gather(*(stage.post("/v1/cache/pins", each, "b") for each in asked))
    assert sorted(status for status, _ in answers) == [200] + [429] * 5


async def test_a_pin_requires_a_full_block(stage: Stage) -> None:
    status, answer = await stage.post("/v1/cache/pins", {"tokens": [1, 2]})
    assert (status, "16 tokens" in answer["error"]["message"]) == (400, True)
    assert (await stage.post("/v1/cache/pins", {"tokens": [1] * 20, "ttl": "9d"}))[0] == 400


# --- clear ---


async def test_a_tenant_clears_its_own_blocks(stage: Stage) -> None:
    status, answer = await stage.post("/v1/cache/clear", {})
    assert (status, answer["blocks"]) == (200, 2 * (2 + 2 + 3))
    for holder in (stage.a, stage.b, stage.store):
        meant = {(command.salt, command.tenant) for command in commands_received(holder, Clear)}
        salts = [stage.tenants.salt(MODEL, adapter, stage.team) for adapter in ("", "tuned")]
        assert meant == {(salt, stage.team) for salt in salts}
    stage.a.controls.clear()
    await stage.post("/v1/cache/clear", {"model": "tuned", "tiers": [0]})
    assert await only_command(stage.a, Clear) == Clear(salts[1], [0], MODEL, stage.team)


async def test_tiers_are_cleared_on_the_instances_that_may_have_them(stage: Stage) -> None:
    for tiers in ([1], [1, 2]):
        _, answer = await stage.post("/v1/cache/clear", {"tiers": tiers})
        assert {entry["name"] for entry in answer["instances"]} == {"store", "a", "b"}
    _, answer = await stage.post("/v1/cache/clear", {"tiers": [0]})
    assert {entry["name"] for entry in answer["instances"]} == {"a", "b"}


async def test_the_answer_names_what_is_not_cleared(stage: Stage) -> None:
    _, answer = await stage.post("/v1/cache/clear", {})
    assert answer["ok"]
    assert all(entry["ok"] and entry["not_cleared"] == [] for entry in answer["instances"])
    stage.a.control_ok = stage.b.control_ok = False
    stage.a.not_cleared = [NotCleared(1, "its reason")]
    status, answer = await stage.post("/v1/cache/clear", {"tiers": [0, 1, 2]})
    left = {entry["name"]: entry["not_cleared"] for entry in answer["instances"]}
    assert (status, answer["ok"]) == (200, False)
    assert left == {
        "a": [{"tier": 1, "reason": "its reason"}],
        "b": [{"tier": tier, "reason": "why"} for tier in (0, 2)],
        "store": [],
    }
    log = (stage.mesh.folder / "frontend-0.log").read_text()
    assert "not cleared: a: why; b: why" in log or "not cleared: b: why; a: why" in log


async def test_a_process_that_is_gone_clears_nothing(stage: Stage) -> None:
    await stage.a.unsubscribe()
    try:
        _, answer = await stage.post("/v1/cache/clear", {"tiers": [0]})
    finally:
        await stage.a.listen()
    left = {entry["name"]: entry["not_cleared"] for entry in answer["instances"]}
    assert not answer["ok"]
    assert [each["tier"] for each in left["a"]] == [0]
    assert left["a"][0]["reason"]
    assert left["b"] == []


async def test_a_mistyped_field_clears_nothing(stage: Stage) -> None:
    status, answer = await stage.post("/v1/cache/clear", {"tier": [1]})
    assert status == 400
    assert "`tier`" in answer["error"]["message"]
    assert not stage.a.controls


async def test_clearing_all_tenants_requires_the_admin_scope(stage: Stage) -> None:
    assert (await stage.post("/v1/cache/clear", {"all_tenants": True}))[0] == 403
    assert (await stage.post("/v1/cache/clear", {"all_tenants": True}, "root"))[0] == 200
    assert await only_command(stage.a, Clear) == Clear(None, [], MODEL)
    log = (stage.mesh.folder / "frontend-0.log").read_text()
    assert f"key root cleared 7 blocks of {MODEL}, tenant: all, tiers: all, on 3 instances" in log
    body = {"model": "tuned", "all_tenants": True}
    assert (await stage.post("/v1/cache/clear", body, "root"))[0] == 400
    assert (await stage.post("/v1/cache/clear", {"model": "none"}))[0] == 404


# --- release ---


async def test_sessions_are_released_within_their_tenant(stage: Stage) -> None:
    body = {"sessions": ["s", "unknown"], "reason": "compaction", "successor": "t"}
    status, answer = await stage.post("/v1/sessions/release", body)
    assert (status, answer["sessions"], answer["blocks"]) == (200, 2, 7)
    expected = Release(
        sessions=[f"{stage.team}\x1fs", f"{stage.team}\x1funknown"],
        reason="compaction",
        successor=f"{stage.team}\x1ft",
    )
    for holder in (stage.a, stage.b, stage.store):
        assert await only_command(holder, Release) == expected
    assert (await stage.post("/v1/sessions/release", {"sessions": []}))[0] == 400


async def test_a_final_turn_releases_its_session(stage: Stage) -> None:
    headers = {"x-kvmesh-session-id": "s", "x-kvmesh-session-final": "true"}
    await complete(stage, CHAT, {"messages": [ASK]}, **headers)
    assert await only_command(stage.store, Release) == Release(sessions=[f"{stage.team}\x1fs"])
    await only_command(stage.b, Release)
    control = {"session_id": "t", "action": "close"}
    await complete(stage, CHAT, {"messages": [ASK], "nvext": {"session_control": control}})
    assert await eventually(lambda: commands_received(stage.a, Release)[1:])


# --- speculative prefill ---


@pytest.mark.parametrize("running", [False, True], ids=["computed", "still computing"])
async def test_a_hinted_turn_is_prefilled_speculatively_and_its_use_counted(
    stage: Stage, running: bool
) -> None:
    """The next prompt stops a prefill that still runs: what it has not computed is not wasted."""
    hint = {"agent_hints": {"speculative_prefill": True}}
    answer_text = "It is a long answer about files. " * 8
    thought = f"<think>\n{LONG}\n</think>\n\n{answer_text}"
    earlier = [ASK, {"role": "assistant", "content": "Yes?"}, ASK]
    body: dict[str, Any] = {"messages": earlier, "nvext": hint, "max_tokens": 900}
    session = {"x-kvmesh-session-id": f"hinted {running}"}
    work, answer = await complete(stage, CHAT, body, output=thought, **session)
    ahead = await only_command(stage.a, Prefetch)
    assert ahead.tokens.startswith(work.tokens)
    assert (ahead.salt, ahead.tenant) == (work.salt, work.tenant)
    assert ahead.conversation == work.conversation != 0
    assert ahead.compute > 0
    before = stage.mesh.metric("kvmesh_frontend_speculative_tokens_total")
    message = answer["choices"][0]["message"]
    spoken = {"role": "assistant", "content": message["content"]}
    following = {**body, "messages": [*earlier, spoken, ASK]}
    stage.a.control_ok = running
    real, _ = await complete(stage, CHAT, following, **session)
    stage.a.control_ok = True
    assert real.tokens.startswith(ahead.tokens)
    assert ahead.id in [command.request for command in commands_received(stage.a, Cancel)]
    outcome = await outcome_of(stage, attempt(real))
    assert outcome.ahead is not None
    assert (outcome.ahead.prefetch, outcome.ahead.after) == (ahead.id, answer["id"])
    assert (outcome.ahead.tokens, outcome.ahead.differs) == (ahead.compute, False)
    counted = before + (0 if running else ahead.compute)
    await eventually(
        lambda: stage.mesh.metric("kvmesh_frontend_speculative_tokens_total") == counted
    )


async def outcome_of(stage: Stage, request: str) -> Outcome:
    async def find() -> Outcome | None:
        events = await find_events(stage.bus, request, None)
        return next((event for event in events if isinstance(event, Outcome)), None)

    return await eventually(find, what="its outcome") or pytest.fail("no outcome")


async def test_speculative_prefill_counts_against_the_key(stage: Stage) -> None:
    """The limit admits a second turn, but not with the speculative prefill of the first."""
    hint = {"agent_hints": {"speculative_prefill": True}}
    messages = [ASK, {"role": "assistant", "content": "Yes?"}, ASK]
    thought = f"<think>\nHm.\n</think>\n\n{LONG * 2}"
    body: dict[str, Any] = {"messages": messages, "nvext": hint, "max_tokens": 900}
    _, answer = await complete(stage, CHAT, body, key="thrifty", output=thought)
    ahead = await only_command(stage.a, Prefetch)
    used = answer["usage"]["total_tokens"]
    assert used < 1400 < 1600 < used + ahead.compute

    async def refused() -> bool:
        return (await stage.post("/v1/tokenize", {"prompt": "Hi"}, "thrifty"))[0] == 429

    await eventually(refused)
