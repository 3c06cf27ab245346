"""A running vLLM server with the connector to the block manager, and the sidecar beside it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import pytest
import pytest_asyncio
from support.nats import NatsServer
from support.prefetch_suite import prefetch_of
from support.recorder import Recorder
from support.vllm import SIZE, VllmRun, sequence
from support.vllm_kvbm import kvbm_mesh
from support.vllm_server import vllm_server
from support.wait import eventually

from kvmesh.bus.messages import Clear
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.abilities import DECLARED, abilities
from kvmesh.worker.capabilities import Tiered
from kvmesh.worker.engine import EngineContext, create_engine

if TYPE_CHECKING:
    from kvmesh.worker.engines.vllm.kvbm.parts import KvParts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
CONNECTORS = [
    {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    for name in ("KvmeshConnector", "KvmeshRetentionConnector")
]
TRANSFER = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": CONNECTORS},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(
    nats_server: NatsServer, slow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmRun]:
    folder = tmp_path_factory.mktemp("server")
    events = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    arguments = ["--max-model-len", "512", "--max-num-seqs", "4", "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
    arguments += ["--kv-transfer-config", json.dumps(TRANSFER)]
    async with kvbm_mesh(nats_server, folder) as mesh:
        env = {
            "VLLM_PLUGINS": "kvmesh",
            "KVMESH_NATS_URL": mesh.nats_url,
            "KVMESH_NATS_NAMESPACE": mesh.namespace,
            "KVMESH_STREAMS_LEASE_S": "1",
            "KVMESH_WORKER_NODE": "here",
            "KVMESH_WORKER_SERVED_NAME": "tiny",
        }
        with vllm_server(slow_model, folder, *arguments, env=env) as server:
            await server.ready()
            remote = RemoteSettings(
                url=server.url,
                kv_events=events["endpoint"],
                kv_replay=events["replay_endpoint"],
                kvbm=True,
                probe_s=0.2,
            )
            worker = WorkerSettings(engine="openai", served_name="tiny")
            settings = Settings(remote=remote, worker=worker)
            engine, sink = create_engine(EngineContext(settings, slow_model)), Recorder()
            made = VllmRun(engine, await engine.start(sink), sink)
            yield made
            await engine.close()


async def clear(run: VllmRun) -> None:
    """Empty the server's own cache, once its blocks are no longer being copied."""
    await asyncio.wait_for(run.engine.drain(), 30)

    async def is_empty() -> bool:
        assert (await run.execute(Clear(tiers=[0]))).ok
        return not run.held_hashes

    await eventually(is_empty, what="the cache is empty")
    run.sink.deltas.clear()


async def test_a_cleared_prompt_is_loaded_from_the_block_manager(run: VllmRun) -> None:
    tokens = run.prompt(4.7)
    await run.run("first", tokens)
    answer = run.sink.tokens("first")

    async def is_loaded() -> bool:
        await clear(run)
        await run.run("again", tokens)
        assert run.sink.tokens("again") == answer
        return run.sink.cached("again") == 4 * SIZE

    await eventually(is_loaded, what="all full blocks are loaded")
    assert sum(run.sink.tiers("again")[1:]) == 4 * SIZE
    engine = run.engine
    assert isinstance(engine, Tiered)

    def told() -> bool:
        counts = engine.tier_counts()
        return counts is not None and counts.loaded[1] >= 4 and counts.written >= 4

    await eventually(told, what="the server's metrics")


async def test_the_worker_has_lower_tiers(run: VllmRun) -> None:
    assert run.info.tiered
    assert abilities(run.engine, run.info) == set(DECLARED["openai"])


async def test_a_prefetch_loads_from_the_block_manager(run: VllmRun) -> None:
    tokens = run.prompt(8.5, first=7)
    held = set(sequence(tokens))
    await run.run("first", tokens, max_tokens=1)
    for _ in range(30):
        await clear(run)
        assert (await run.execute(prefetch_of(run, tokens, compute=0))).ok
        with suppress(AssertionError):
            await eventually(lambda: held <= run.held_hashes, timeout=3)
            break
    assert held <= run.held_hashes, "all full blocks are loaded"
    await run.run("again", tokens, max_tokens=1)
    assert run.sink.cached("again") == 8 * SIZE


@pytest.mark.parametrize(
    "forged",
    [
        {"lora_request": SimpleNamespace(lora_name="other")},
        {"mm_features": ["an image"]},
        {"prompt_embeds": b""},
        {"kv_transfer_params": {"kvmesh": {"request": "r", "salt": 1, "adapter": "poet"}}},
        {"kv_transfer_params": {"kvmesh": {"request": "r", "salt": -1}}},
        {"kv_transfer_params": None},
        {
            "lora_request": SimpleNamespace(lora_name="bare"),
            "kv_transfer_params": {"kvmesh": {"request": "r", "salt": 1, "adapter": "bare"}},
        },
    ],
)
def test_no_block_is_looked_up_under_a_forged_origin(forged: dict[str, Any]) -> None:
    from kvmesh.worker.engines.vllm.kvbm.scheduler_side import SchedulerSide

    request = SimpleNamespace(
        request_id="r",
        num_tokens=100,
        all_token_ids=[1] * 100,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        kv_transfer_params={"kvmesh": {"request": "r", "salt": 1}},
    )
    bridge, parts = MagicMock(), SimpleNamespace(block_size=SIZE)
    bridge.lookup.return_value = 2
    side = SchedulerSide(bridge, cast("KvParts", parts))
    assert side.get_num_new_matched_blocks(request, 0) == (2 * SIZE, True)
    bridge.lookup.reset_mock()
    request.__dict__.update(forged)
    assert side.get_num_new_matched_blocks(request, 0) == (0, False)
    assert not bridge.lookup.called
