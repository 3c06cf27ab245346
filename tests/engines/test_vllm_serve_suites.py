"""Retention and prefetches through a vLLM server with the plugin: the suites of all engines."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import StartedEngine
from support.prefetch_suite import SlicedPrefetchSuite
from support.recorder import Recorder
from support.retention_suite import RetentionSuite, emptied
from support.vllm import VllmRun
from support.vllm_server import vllm_server

from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.abilities import DECLARED, TIERS, abilities
from kvmesh.worker.engine import EngineContext, create_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
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
    arguments += ["--kv-transfer-config", connector, "--enable-prompt-tokens-details"]
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
async def started(shared: VllmRun) -> StartedEngine:
    return await emptied(shared)


async def test_with_the_plugin_all_abilities_are_there(shared: VllmRun) -> None:
    assert abilities(shared.engine, shared.info) == set(DECLARED["openai"]) - {TIERS}


class TestServerRetention(RetentionSuite):
    """The suite of all engines, on a server beside the worker."""


class TestServerPrefetch(SlicedPrefetchSuite):
    """The suite of all engines that prefetch, on a server beside the worker."""


async def test_cached_tokens_are_the_server_s_own(started: StartedEngine) -> None:
    """Requests that wait for a first token of each other: events would tell too little."""
    tokens = started.prompt(10.5)
    for number in range(6):
        started.submit(f"r{number}", tokens, max_tokens=4)
    await started.ended(*(f"r{number}" for number in range(6)))
    told = [started.sink.cached(f"r{number}") for number in range(6)]
    assert max(told) == 10 * started.size
