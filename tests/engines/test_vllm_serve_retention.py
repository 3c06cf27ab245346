"""Retention through a running vLLM server with the plugin: the contract of every such engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.recorder import Recorder
from support.retention_suite import RetentionSuite
from support.vllm import VllmRun
from support.vllm_server import vllm_server
from support.wait import eventually

from kvmesh.bus.messages import Clear
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.abilities import DECLARED, abilities
from kvmesh.worker.capabilities import Retaining
from kvmesh.worker.engine import EngineContext, create_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmRun]:
    folder = tmp_path_factory.mktemp("server")
    arguments = ["--max-model-len", "1024", "--max-num-seqs", "4"]
    arguments += ["--scheduling-policy", "priority", "--kv-events-config"]
    arguments += [
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "ipc://{folder}/events", "replay_endpoint": "ipc://{folder}/replay"}}'
    ]
    connector = '{"kv_connector": "KvmeshRetentionConnector", "kv_role": "kv_both"}'
    arguments += ["--kv-transfer-config", connector]
    plugins = {"VLLM_PLUGINS": "kvmesh"}
    with vllm_server(tiny_model, folder, *arguments, blocks=65, env=plugins) as server:
        await server.ready()
        remote = RemoteSettings(
            url=server.url,
            kv_events=f"ipc://{folder}/events",
            kv_replay=f"ipc://{folder}/replay",
            priority="lower",
            probe_s=0.2,
        )
        settings = Settings(remote=remote, worker=WorkerSettings(engine="openai"))
        engine, sink = create_engine(EngineContext(settings, tiny_model)), Recorder()
        made = VllmRun(engine, await engine.start(sink), sink)
        assert made.info.reports_outcomes
        yield made
        await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    """The shared engine with an empty cache and a fresh record."""
    await asyncio.wait_for(shared.engine.drain(), 60)
    assert isinstance(shared.engine, Retaining)
    await shared.engine.release(["A", "B", "s"])
    await shared.engine.unpin("p")
    assert (await shared.execute(Clear())).ok
    await eventually(lambda: not shared.held_hashes, what="the cache is empty")
    (state,) = shared.engine.retention()
    assert state.charged_blocks == 0
    shared.earlier = state.outcomes
    shared.sink.deltas.clear()
    shared.sink.order.clear()
    return shared


async def test_with_the_plugin_all_abilities_are_there(shared: VllmRun) -> None:
    assert abilities(shared.engine, shared.info) == set(DECLARED["openai"])


class TestServerRetention(RetentionSuite):
    """The suite of all engines, on a server beside the worker."""

    knows_cached_tokens = False
