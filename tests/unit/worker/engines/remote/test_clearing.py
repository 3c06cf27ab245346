"""Clearing of servers behind HTTP: after `ok` no prompt finds a block that was named."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from support.api_server import ApiServer
from support.engines import prompt, work
from support.recorder import Recorder
from support.wait import eventually

from kvmesh.bus.messages import Clear, ControlReply
from kvmesh.demo import model_dir
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.adapters import engine_stores
from kvmesh.worker.capabilities import execute_command
from kvmesh.worker.engine import Engine, EngineContext, create_engine
from kvmesh.worker.engines.remote import clearing
from kvmesh.worker.engines.remote import server as servers
from kvmesh.worker.engines.remote.retention import OLD_PLUGIN, ServerRetention

TOKENS = prompt(100)


class Sidecar:
    """An engine before a server of 64 blocks of 16 tokens."""

    def __init__(self, server: ApiServer, engine: Engine, sink: Recorder) -> None:
        self.server, self.engine, self.sink = server, engine, sink
        self.names = 0

    async def cached(self, tokens: bytes = TOKENS) -> int:
        """The cached tokens that the server finds of a prompt."""
        self.names += 1
        name = f"r{self.names}"
        self.engine.submit(work(name, tokens, max_tokens=1))
        await eventually(lambda: self.sink.finish(name))
        return self.sink.cached(name)

    async def clear(self, *tiers: int, salt: int | None = None) -> ControlReply:
        return await execute_command(self.engine, "openai", Clear(salt, list(tiers)))

    async def kept(self, *tiers: int, salt: int | None = None) -> dict[int, str]:
        reply = await self.clear(*tiers, salt=salt)
        assert reply.ok == (not reply.not_cleared)
        assert all(each.reason in reply.reason for each in reply.not_cleared)
        return {each.tier: each.reason for each in reply.not_cleared}


Start = Callable[..., Awaitable[Sidecar]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    made: list[Sidecar] = []
    with TemporaryDirectory() as folder:

        async def begin(style: str = "vllm", **options: object) -> Sidecar:
            server = ApiServer(Path(folder), style, prompt_details=True, **options)  # type: ignore[arg-type]  # of a test
            await server.start()
            remote = RemoteSettings(url=server.url, kv_events=server.publisher.endpoint)
            worker = WorkerSettings(engine="openai", block_size=16, context=512)
            engine = create_engine(
                EngineContext(Settings(remote=remote, worker=worker), model_dir())
            )
            sink = Recorder()
            await engine.start(sink)
            made.append(Sidecar(server, engine, sink))
            return made[-1]

        yield begin
        for sidecar in made:
            await sidecar.engine.close()
            await sidecar.server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stores, "CLEAR_S", 0.3)
    monkeypatch.setattr(engine_stores, "RETRY_S", 0.05)
    monkeypatch.setattr(clearing, "CLEAR_S", 2.3)


@pytest.mark.parametrize(
    ("style", "options"),
    [
        ("vllm", {}),
        ("vllm", {"connector": "NixlConnector"}),
        ("vllm", {"connector": "OffloadingConnector"}),
        ("sglang", {}),
        ("sglang", {"storage": "file"}),
    ],
)
async def test_after_ok_the_next_prompt_finds_nothing(
    start: Start, style: str, options: dict[str, str]
) -> None:
    sidecar = await start(style, **options)
    assert await sidecar.cached() == 0
    assert await sidecar.cached() == 96
    assert await sidecar.kept() == {}
    await eventually(lambda: not sidecar.sink.held[0], what="the index is empty")
    assert await sidecar.cached() == 0


async def test_a_server_is_asked_for_its_arguments_before_they_are_needed(start: Start) -> None:
    sidecar = await start()
    await eventually(lambda: sidecar.server.told, what="vLLM takes long for the first reply")


async def test_a_connector_that_cannot_be_cleared_is_named(start: Start) -> None:
    sidecar = await start(connector="LMCacheConnectorV1")
    await sidecar.cached()
    reason = "LMCacheConnectorV1 cannot be cleared"
    assert await sidecar.kept() == {1: reason, 2: reason, 3: reason}
    assert await sidecar.kept(0) == {}
    assert await sidecar.cached() == 96


async def test_storage_that_sglang_cannot_clear_is_named(start: Start) -> None:
    sidecar = await start("sglang", storage="eic")
    await sidecar.cached()
    assert await sidecar.kept() == {3: "SGLang's storage eic cannot be cleared"}
    assert await sidecar.cached() == 96


async def test_a_lower_tier_alone_is_not_cleared_by_vllm(start: Start) -> None:
    sidecar = await start(connector="OffloadingConnector")
    await sidecar.cached()
    assert await sidecar.kept(1) == {1: "vLLM clears it with tier 0 only: name that tier, too"}
    assert await sidecar.kept(2) == {}
    assert await sidecar.kept(0) == {}
    assert not sidecar.server.held
    assert sidecar.server.below
    assert await sidecar.kept(0, 1) == {}
    assert await sidecar.cached() == 0


async def test_engine_and_host_memory_of_sglang_are_cleared_together(start: Start) -> None:
    sidecar = await start("sglang", storage="file")
    await sidecar.cached()
    reason = "SGLang clears tiers 0 and 1 together only: name both"
    assert await sidecar.kept(0) == {0: reason}
    assert await sidecar.kept(1) == {1: reason}
    assert sidecar.server.held
    assert await sidecar.kept(2) == {}
    assert not sidecar.server.below
    assert await sidecar.kept(0, 1) == {}
    assert not sidecar.server.held


@pytest.mark.parametrize("style", ["vllm", "sglang"])
async def test_blocks_in_use_are_told(start: Start, style: str) -> None:
    sidecar = await start(style)
    sidecar.server.step_s = 0.02
    await sidecar.cached()
    sidecar.engine.submit(work("long", TOKENS, max_tokens=400))
    await eventually(lambda: sidecar.sink.tokens("long"))
    kept = await sidecar.kept()
    assert list(kept) == [0]
    assert ("in use" in kept[0] or "use some" in kept[0]) or "idle" in kept[0]
    assert sidecar.server.refused
    sidecar.engine.abort("long")
    await eventually(lambda: not sidecar.server.running)
    assert await sidecar.kept() == {}
    assert await sidecar.cached() == 0


async def test_a_clear_waits_for_the_end_of_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_stores, "CLEAR_S", 60.0)
    sidecar = await start()
    sidecar.server.step_s = 0.01
    sidecar.engine.submit(work("long", TOKENS, max_tokens=30))
    await eventually(lambda: sidecar.sink.tokens("long"))
    assert await sidecar.kept() == {}
    assert sidecar.server.refused
    assert sidecar.sink.finish("long") == "length"


async def test_without_the_development_mode_the_reason_says_so(start: Start) -> None:
    sidecar = await start(development=False)
    await sidecar.cached()
    kept = await sidecar.kept(0, 1)
    assert kept.keys() == {0, 1}
    assert all("VLLM_SERVER_DEV_MODE=1" in reason for reason in kept.values())
    assert await sidecar.cached() == 96


@pytest.mark.parametrize("style", ["vllm", "sglang"])
async def test_one_namespace_needs_the_plugin(start: Start, style: str) -> None:
    sidecar = await start(style)
    await sidecar.cached()
    kept = await sidecar.kept(0, salt=77)
    assert kept.keys() == {0}
    assert "namespace" in kept[0]
    assert await sidecar.cached() == 96


async def test_a_server_that_refuses_or_is_gone_clears_nothing(start: Start) -> None:
    sidecar = await start()

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Unauthorized"}}, status=401)

    other = web.Application()
    other.add_routes([web.post("/reset_prefix_cache", refuse)])
    runner = web.AppRunner(other)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = sidecar.engine._server  # type: ignore[attr-defined]  # as if it had changed
    server._url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kept = await sidecar.kept(0)
    assert kept == {0: "the server replied 401 to /reset_prefix_cache: Unauthorized"}
    await runner.cleanup()
    reply = await sidecar.clear()
    assert not reply.ok
    assert server._url in reply.reason


async def test_a_frozen_server_clears_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(clearing, "TIMEOUT_S", 0.3)
    sidecar = await start()
    held: list[asyncio.StreamWriter] = []
    frozen = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    server = sidecar.engine._server  # type: ignore[attr-defined]  # as if it had frozen
    server._url = f"http://127.0.0.1:{frozen.sockets[0].getsockname()[1]}"
    reply = await sidecar.clear()
    assert not reply.ok
    assert "does not reply" in reply.reason
    frozen.close()
    for writer in held:
        writer.close()


@pytest.mark.parametrize("kept", [None, {}, {"1": "why"}])
async def test_an_older_plugin_says_nothing_of_other_stores(
    start: Start, kept: dict[str, str] | None
) -> None:
    sidecar = await start(development=False)

    async def command(_: web.Request) -> web.Response:
        more = {} if kept is None else {"kept": kept}
        return web.json_response({"blocks": 5, "ranks": [], **more})

    plugin = web.Application()
    plugin.add_routes([web.post("/v1/kvmesh/retention/command", command)])
    runner = web.AppRunner(plugin)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine: Any = sidecar.engine
    engine._retention = ServerRetention(engine._http, f"http://127.0.0.1:{runner.addresses[0][1]}")
    reply = await sidecar.clear(0, 1)
    assert (reply.blocks, reply.ok) == (5, kept == {})
    reasons = {each.tier: each.reason for each in reply.not_cleared}
    assert reasons == ({1: OLD_PLUGIN} if kept is None else {1: "why"} if kept else {})
    await runner.cleanup()
