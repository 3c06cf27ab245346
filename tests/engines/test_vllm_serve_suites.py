"""Retention and prefetches through a vLLM server with the plugin: the suites of all engines."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.prefetch_suite import PrefetchSuite, prefetch_of
from support.recorder import Recorder
from support.retention_suite import RetentionSuite
from support.vllm import VllmRun, prompt, sequence
from support.vllm_server import vllm_server
from support.wait import eventually

from kvmesh.bus.messages import Clear
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.abilities import DECLARED, TIERS, abilities
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
    assert abilities(shared.engine, shared.info) == set(DECLARED["openai"]) - {TIERS}


class TestServerRetention(RetentionSuite):
    """The suite of all engines, on a server beside the worker."""


class TestServerPrefetch(PrefetchSuite):
    """The suite of all engines that prefetch, on a server beside the worker."""


async def test_a_prefetch_computes_beside_a_running_request(started: VllmRun) -> None:
    alone = started.prompt(2, first=9)
    await started.run("before", alone, max_tokens=600)
    started.submit("beside", alone, max_tokens=600)
    await started.wait_for_tokens("beside")
    tokens = started.prompt(12)
    assert (await started.execute(prefetch_of(started, tokens, compute=12 * started.size))).ok
    await eventually(lambda: sequence(tokens)[0] in started.held_hashes, what="a first slice")
    assert not started.sink.finish("beside")
    await started.ended("beside")
    assert started.sink.tokens("beside") == started.sink.tokens("before")
    held = set(sequence(tokens))
    await eventually(lambda: held <= started.held_hashes, what="the whole prompt")
    assert not started.sink.tokens("p")


async def test_what_a_prefetch_computed_before_its_request_is_cached(started: VllmRun) -> None:
    tokens, requests = started.prompt(25), started.load().requests
    assert (await started.execute(prefetch_of(started, tokens, compute=25 * started.size))).ok
    await eventually(lambda: len(started.held_hashes) >= 3, what="some slices")
    held = started.depth(tokens)
    await started.run("a", tokens, max_tokens=1)
    assert started.sink.cached("a") >= held
    assert started.load().requests == requests + 1, "slices are not counted"
    assert not started.engine.abort("p"), "the request is here"


async def test_cached_tokens_are_the_server_s_own(started: VllmRun) -> None:
    """Requests that wait for a first token of each other: events would tell too little."""
    tokens = started.prompt(10.5)
    for number in range(6):
        started.submit(f"r{number}", tokens, max_tokens=4)
    await started.ended(*(f"r{number}" for number in range(6)))
    told = [started.sink.cached(f"r{number}") for number in range(6)]
    assert max(told) == 10 * started.size


async def test_an_ended_prefetch_leaves_nothing_running(started: VllmRun) -> None:
    for number in range(20):
        command = prefetch_of(started, prompt(480, first=number), compute=480, deadline_s=5.0)
        assert (await started.execute(command)).ok
        await asyncio.sleep(0)
        assert started.engine.abort("p")
    before = time.monotonic()
    await started.run("a", started.prompt(1), max_tokens=1)
    assert time.monotonic() - before < 30
    await started.wait_for_events()
    await eventually(lambda: not started.load().active_blocks, what="no block is in use")
