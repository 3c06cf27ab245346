"""vLLM's own server with the plugin's flag and vLLM's switch for offloading, behind the sidecar."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from support.recorder import Recorder
from support.vllm import SIZE, prompt, sequence, work
from support.vllm_offload import PLUGIN, host_copies
from support.vllm_server import VllmServer, vllm_server
from support.wait import eventually

from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.capabilities import TierCounts, Tiered
from kvmesh.worker.engine import EngineContext, create_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
HOST = 1


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    flag = {"kv_connector": "KvmeshRetentionConnector", "kv_role": "kv_both"}
    arguments = ["--max-model-len", "512", "--kv-offloading-size", "0.05"]
    arguments += ["--kv-transfer-config", json.dumps(flag), "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps(events)]
    env = {"VLLM_PLUGINS": f"kvmesh,{PLUGIN}"}
    with (
        host_copies(tmp_path / "plugins"),
        vllm_server(tiny_model, tmp_path, *arguments, blocks=17, env=env) as server,
    ):
        yield server


async def test_the_switch_works_beside_the_plugin_s_flag(
    served: VllmServer, tiny_model: Path, tmp_path: Path
) -> None:
    await served.ready()
    remote = RemoteSettings(
        url=served.url,
        kv_events=f"ipc://{tmp_path}/events",
        kv_replay=f"ipc://{tmp_path}/replay",
        probe_s=0.2,
    )
    settings = Settings(remote=remote, worker=WorkerSettings(engine="openai", served_name="tiny"))
    engine, sink = create_engine(EngineContext(settings, tiny_model)), Recorder()
    info = await engine.start(sink)
    assert info.reports_outcomes  # retention runs
    tokens = prompt(5 * SIZE + 1, 1000)
    hashes = set(sequence(tokens)[:5])
    for number, prompted in enumerate([tokens, *(prompt(200, n) for n in range(4)), tokens]):
        engine.submit(work(str(number), prompted, 1))
        await eventually(partial(sink.finish, str(number)), what="the answer")
        await eventually(lambda: hashes <= sink.sequences_below(HOST), what="the host's blocks")
    assert sink.cached("5") == 5 * SIZE
    assert sink.tiers("5")[:2] == [0, 5 * SIZE]
    assert sink.tiers("0")[0] == sum(sink.tiers("0"))
    assert sink.tokens("5") == sink.tokens("0")
    assert isinstance(engine, Tiered)
    expected = TierCounts(loaded=[0, 5, 0, 0])
    await eventually(lambda: engine.tier_counts() == expected, what="the server's counts")
    async with aiohttp.ClientSession() as http, http.get(f"{served.url}/metrics") as response:
        text = await response.text()
    assert 'source="host"' in text
    await engine.close()
