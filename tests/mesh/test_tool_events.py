"""A frontend reports what sessions wait for, and passes on the reports of harnesses on tools."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
from support.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api, every_api
from support.frontend import (
    Client,
    ScriptedWorker,
    client_session,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.wait import eventually
from tokenizers import Tokenizer

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk, Decision, MessageDecoder, Outcome, RouteEvent, ToolEvent
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.demo import model_dir
from kvmesh.frontend.auth.tenant_secret import tenant_secret
from kvmesh.frontend.namespaces import TenantNamespaces, scoped

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = StreamLimits(kv_bytes=256 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
KEYS = ("a", "b")
ROUTES: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
COMMAND = {"name": "Bash", "arguments": {"command": "cd /home/ann && npm test -- hunter2"}}
RAW = f"I test it.\n<tool_call>\n{json.dumps(COMMAND)}\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
HOOK = "/v1/hooks/claude-code"


@dataclass
class Stage:
    """A frontend whose keys `a` and `b` have tenants of these names, and no scope."""

    mesh: Mesh
    bus: Bus
    client: Client
    worker: ScriptedWorker
    tenants: TenantNamespaces
    outcomes: list[Outcome] = field(default_factory=list)
    events: list[ToolEvent] = field(default_factory=list)

    async def answer(self, api: Api, raw: str, **headers: str) -> Outcome:
        """The outcome of a request to which the engine answers `raw`."""
        number = len(self.worker.works)
        body = api.body("Test it.", 900, **({} if api is COMPLETIONS else {"tools": tools(api)}))
        sending = asyncio.create_task(api.send(self.client, body, **bearer("a"), **headers))
        work = await self.worker.work(number)
        tokens = TOKENIZER.encode(raw, add_special_tokens=False).ids
        await self.worker.send(work, Chunk(work.request, 0, tokens, finish="stop"))
        content = await sending
        found = await eventually(
            lambda: [o for o in self.outcomes if o.request.startswith(content.id)],
            what="the outcome",
        )
        assert found
        return found[0]

    async def post(self, path: str, body: Any, key: str = "a", **headers: str) -> tuple[int, Any]:
        return await self.client.post(path, body, **bearer(key), **headers)

    async def heard(self) -> ToolEvent:
        """The next event of a tool."""
        await eventually(lambda: self.events, what="an event of a tool")
        return self.events.pop(0)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tools(api: Api) -> list[dict[str, Any]]:
    if api is CHAT:
        return [{"type": "function", "function": {"name": "Bash", "parameters": SCHEMA}}]
    if api is RESPONSES:
        return [{"type": "function", "name": "Bash", "parameters": SCHEMA}]
    return [{"name": "Bash", "input_schema": SCHEMA}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("tools")
    keys = [
        f'[[key]]\nname = "{name}"\ntenant = "{name}"\n'
        f'sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name in KEYS
    ]
    (folder / "keys.toml").write_text("".join(keys))
    settings = {**stream_env(LIMITS), "KVMESH_FRONTEND_KEYS_FILE": str(folder / "keys.toml")}
    mesh = Mesh(nats_server.url, folder, settings, metrics_port=free_port())
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    mesh.start("frontend", "frontend-0")
    async with (
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "w", tool_parser="hermes") as worker,
        client_session() as session,
    ):
        router.order = [worker.instance]
        client = Client(mesh.url, session)

        async def serves() -> bool:
            try:
                async with session.get(f"{mesh.url}/v1/models", headers=bearer("a")) as models:
                    return len((await models.json())["data"]) == 1
            except aiohttp.ClientError:
                return False

        await eventually(serves, what="the frontend serves the model")
        tenants = TenantNamespaces(await tenant_secret(bus, None))
        stage = Stage(mesh, bus, client, worker, tenants)

        def route(event: Decision | Outcome) -> None:
            if isinstance(event, Outcome):
                stage.outcomes.append(event)

        await bus.subscribe(bus.subjects.route_all, ROUTES, route)
        await bus.subscribe(bus.subjects.tool_all, MessageDecoder(ToolEvent), stage.events.append)
        yield stage
    mesh.stop()
    await bus.close()


@every_api
async def test_an_outcome_says_what_its_session_waits_for(stage: Stage, api: Api) -> None:
    called = await stage.answer(api, RAW, **{"User-Agent": "claude-cli/2.1 (external, cli)"})
    said = await stage.answer(api, "I am done.", **{"User-Agent": "our own"})
    raw = api is COMPLETIONS
    assert called.waits_for == ([] if raw else ["tool", "Bash", "npm test"])
    assert said.waits_for == ([] if raw else ["human"])
    assert (called.agent, said.agent) == ("claude-code", "other")


async def test_a_subagent_that_answers_has_ended(stage: Stage) -> None:
    child = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "x"}
    outcome = await stage.answer(MESSAGES, "I counted three.", **child)
    assert (outcome.agent, outcome.waits_for) == ("claude-code/subagent", ["end"])
    outcome = await stage.answer(MESSAGES, RAW, **child)
    assert outcome.waits_for == ["tool", "Bash", "npm test"]


async def test_a_report_reaches_the_bus_under_the_name_of_its_session(stage: Stage) -> None:
    body = {"event": "started", "call": "toolu_1", "tool": "Bash", "remaining_s": 90}
    status, answer = await stage.post("/v1/sessions/s/tools", body)
    assert (status, answer) == (200, {"object": "session.tools", "session": "s", "events": 1})
    event = await stage.heard()
    outcome = await stage.answer(CHAT, RAW, **{"x-kvmesh-session-id": "s"})
    assert event.session == outcome.session == scoped(stage.tenants.tag("a"), "s")
    assert (event.event, event.call, event.tool) == ("started", "toolu_1", "Bash")
    assert event.remaining_s == 90.0
    assert abs(event.time - outcome.time) < 600
    counted = stage.mesh.metrics()['kvmesh_frontend_tool_events_total{event="started"}']
    assert counted >= 1.0


@pytest.mark.parametrize("path", ["main/agent-1", "main%2Fagent-1"])
async def test_a_subagent_is_named_with_or_without_an_escape(stage: Stage, path: str) -> None:
    url = f"/v1/sessions/{path}/tools"
    assert (await stage.post(url, [{"event": "progress"}, {"event": "ended"}]))[0] == 200
    found = [await stage.heard(), await stage.heard()]
    assert {event.session for event in found} == {scoped(stage.tenants.tag("a"), "main/agent-1")}
    assert [event.event for event in found] == ["progress", "ended"]


async def test_a_tenant_reports_on_its_own_sessions_only(stage: Stage) -> None:
    victim = scoped(stage.tenants.tag("a"), "s")
    for name in ("s", victim, f"\x1f{victim}"):
        path = f"/v1/sessions/{quote(name, safe='')}/tools"
        assert (await stage.post(path, {"event": "ended"}, "b"))[0] == 200
        assert (await stage.heard()).session.startswith(f"{stage.tenants.tag('b')}\x1f")
        assert (await stage.post(path, {"event": "ended"}, "a", **{"x-tenant-id": "part"}))[
            0
        ] == 200
        assert (await stage.heard()).session.startswith(f"{stage.tenants.tag('a', 'part')}\x1f")


async def test_a_hook_of_claude_code_is_a_report(stage: Stage) -> None:
    hook = {
        "session_id": "s",
        "agent_id": "x",
        "hook_event_name": "PermissionRequest",
        "tool_name": "Bash",
        "tool_use_id": "toolu_1",
        "tool_input": {"command": "ls"},
        "cwd": "/home/ann",
    }
    assert await stage.post(HOOK, hook) == (200, {})
    event = await stage.heard()
    assert event.session == scoped(stage.tenants.tag("a"), "s/x")
    assert (event.event, event.tool, event.call) == ("awaiting_approval", "Bash", "toolu_1")
    assert await stage.post(HOOK, {**hook, "hook_event_name": "Stop"}) == (200, {})
    assert (await stage.post(HOOK, {**hook, "session_id": ""}))[0] == 400
    assert not stage.events


async def test_a_malformed_report_is_an_error_in_the_shape_of_the_client(stage: Stage) -> None:
    path = "/v1/sessions/s/tools"
    status, answer = await stage.post(path, {"event": "paused"})
    assert (status, answer["error"]["param"]) == (400, "event")
    status, answer = await stage.post(path, {"event": "paused"}, **{"anthropic-version": "x"})
    assert (status, answer["type"]) == (400, "error")
    assert (await stage.post(path, {"event": "ended"}, "nobody"))[0] == 401
    assert (await stage.post(f"/v1/sessions/{'x' * 513}/tools", {"event": "ended"}))[0] == 400
    assert not stage.events


async def test_the_command_reports_a_tool(stage: Stage) -> None:
    flags = ("--tool", "Bash", "--remaining", "120", "--url", stage.mesh.url, "--api-key")
    done = await stage.mesh.command("tool", "main/x", "started", *flags, "a")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    event = await stage.heard()
    assert event.session == scoped(stage.tenants.tag("a"), "main/x")
    assert (event.tool, event.remaining_s) == ("Bash", 120.0)
    refused = await stage.mesh.command("tool", "s", "started", *flags, "nobody")
    assert refused.returncode == 1
    assert refused.stderr.startswith("kvmesh tool: 401 ")
    nowhere = f"http://127.0.0.1:{free_port()}"
    absent = await stage.mesh.command("tool", "s", "started", "--url", nowhere)
    assert (absent.returncode, absent.stderr.count("\n")) == (1, 1)
    assert nowhere in absent.stderr
