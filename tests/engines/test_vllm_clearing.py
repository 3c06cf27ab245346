"""Clearing of vLLM's memory together with the host tier of its own offloading."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from support.engines import StartedEngine, prompt
from support.recorder import Recorder
from support.vllm import PLAIN, SIZE, VllmRun, sequence
from support.vllm_offload import PLUGIN, host_copies
from support.vllm_server import vllm_server
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.messages import Clear
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, VllmSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, create_engine
from kvmesh.worker.engines.remote.server import InferenceServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
HOST = 1
TOKENS = prompt(5 * SIZE + 1, 1000)
HELD = set(sequence(TOKENS)[:5])
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 5e7, "self_describing_kv_events": True},
}
RETENTION = {"kv_connector": "KvmeshRetentionConnector", "kv_role": "kv_both"}
SERVERS = {
    "development mode": (OFFLOADING, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": PLUGIN}),
    "neither": (OFFLOADING, {"VLLM_PLUGINS": PLUGIN}),
    "plugin": (
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [OFFLOADING, RETENTION]},
        },
        {"VLLM_PLUGINS": f"kvmesh,{PLUGIN}"},
    ),
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with host_copies(tmp_path_factory.mktemp("plugins")):
        yield


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[True, False], ids=["retention", "plain"]
)
async def run(
    request: pytest.FixtureRequest, copies: None, tiny_model: Path
) -> AsyncIterator[VllmRun]:
    transfer = f"kv_transfer_config={json.dumps(OFFLOADING)}"
    settings = VllmSettings(retention=request.param)
    made = await VllmRun.start(tiny_model, transfer, vllm=settings)
    yield made
    await made.engine.close()


async def cached(run: StartedEngine, name: str) -> int:
    await run.run(name, TOKENS, max_tokens=1, salt=PLAIN)
    return run.sink.cached(name)


async def stored_below(run: StartedEngine, name: str) -> None:
    """Run the prompt, and wait until the host has its blocks and the index knows them."""
    await cached(run, name)
    await eventually(lambda: run.sink.sequences_below(HOST) >= HELD, what="the host's blocks")


async def test_after_ok_no_tier_has_a_block(run: VllmRun) -> None:
    await stored_below(run, "first")
    assert await cached(run, "again") == 5 * SIZE
    assert (await run.execute(Clear())).ok
    await eventually(lambda: not run.held_hashes, what="no block in the index")
    await eventually(lambda: not run.sink.sequences_below(HOST), what="nor one of the host")
    assert await cached(run, "cleared") == 0


async def test_engine_memory_alone_leaves_the_host_tier(run: VllmRun) -> None:
    await stored_below(run, "before")
    assert (await run.execute(Clear(tiers=[0]))).ok
    assert await cached(run, "loaded") == 5 * SIZE
    assert (await run.execute(Clear(tiers=[0, 1]))).ok
    assert await cached(run, "gone") == 0


async def test_one_namespace_in_the_host_tier_is_named(run: VllmRun) -> None:
    await stored_below(run, "of a namespace")
    reply = await run.execute(Clear(salt=PLAIN))
    assert not reply.ok
    left = [each.tier for each in reply.not_cleared]
    assert left == ([1] if reply.blocks else [0, 1])


async def test_blocks_of_running_requests_are_told(run: VllmRun) -> None:
    run.submit("long", prompt(2 * SIZE + 1, 3000), max_tokens=400, salt=PLAIN)
    await run.wait_for_tokens("long")
    reply = await run.execute(Clear(tiers=[0]))
    assert reply.ok or [each.tier for each in reply.not_cleared] == [0]
    assert reply.ok == (run.sink.finish("long") is not None)
    run.engine.abort("long")
    await asyncio.wait_for(run.engine.drain(), PATIENCE_S)
    assert (await run.execute(Clear())).ok


@pytest.mark.parametrize("kind", list(SERVERS))
async def test_a_server_is_cleared_or_says_what_is_left(
    kind: str, copies: None, tiny_model: Path, tmp_path: Path
) -> None:
    transfer, env = SERVERS[kind]
    endpoints = {
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}
    arguments = ["--max-model-len", "512", "--enable-prompt-tokens-details"]
    arguments += ["--kv-transfer-config", json.dumps(transfer)]
    arguments += ["--kv-events-config", json.dumps(events)]
    with vllm_server(tiny_model, tmp_path, *arguments, env=env) as server:
        await server.ready()
        remote = RemoteSettings(
            url=server.url,
            kv_events=endpoints["endpoint"],
            kv_replay=endpoints["replay_endpoint"],
            probe_s=0.2,
        )
        worker = WorkerSettings(engine="openai", served_name="tiny")
        engine = create_engine(EngineContext(Settings(remote=remote, worker=worker), tiny_model))
        sink = Recorder()
        started = StartedEngine(engine, await engine.start(sink), sink, salt=PLAIN)
        await stored_below(started, "first")
        assert await cached(started, "again") == 5 * SIZE
        if "VLLM_SERVER_DEV_MODE" in env:
            async with aiohttp.ClientSession() as http:  # the worker has asked it, too
                await InferenceServer(http, server.url).arguments(PATIENCE_S)
        reply = await started.execute(Clear())
        if kind == "neither":
            assert not reply.ok
            assert "VLLM_SERVER_DEV_MODE=1" in reply.reason
            assert await cached(started, "left") == 5 * SIZE
        else:
            assert reply.ok, reply.reason
            await eventually(lambda: not sink.sequences, what="no block in the index")
            await eventually(lambda: not sink.sequences_below(HOST), what="nor one of the host")
            assert await cached(started, "cleared") == 0
        await engine.close()
