"""The sidecar in front of a real vLLM server: HTTP, ZeroMQ events, health."""

import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recorder import Recorder
from support.vllm import PLAIN, SIZE, prompt, sequence, work
from support.vllm_server import VllmServer, vllm_server
from support.wait import eventually

from kvmesh.bus.messages import Sampling
from kvmesh.hashing import salt
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.capabilities import AdapterLoading
from kvmesh.worker.engine import EngineContext, create_engine
from kvmesh.worker.lora.folder import AdapterError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[RemoteSettings, VllmServer]]:
    events = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "ipc://{tmp_path}/events", "replay_endpoint": "ipc://{tmp_path}/replay"}}'
    )
    arguments = ["--max-model-len", "512", "--enable-lora", "--max-loras", "2"]
    arguments += ["--scheduling-policy", "priority", "--kv-events-config", events]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm_server(tiny_model, tmp_path, *arguments, env=env) as server:
        remote = RemoteSettings(
            url=server.url,
            kv_events=f"ipc://{tmp_path}/events",
            kv_replay=f"ipc://{tmp_path}/replay",
            priority="lower",
            probe_s=0.2,
        )
        yield remote, server


async def test_a_running_server_joins_through_the_sidecar(
    served: tuple[RemoteSettings, VllmServer], tiny_model: Path, tmp_path: Path
) -> None:
    from support.lora import make_adapter

    remote, server = served
    await server.ready()
    settings = Settings(remote=remote, worker=WorkerSettings(engine="openai"))
    engine, sink = create_engine(EngineContext(settings, tiny_model)), Recorder()
    info = await engine.start(sink)
    assert (info.block_size, info.capacity.blocks, info.context) == (SIZE, 64, 512)

    async def run(name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> list[int]:
        engine.submit(work(name, tokens, max_tokens, **fields))
        # vLLM compiles for the first log probabilities, on a busy machine for minutes
        await eventually(lambda: sink.finish(name), timeout=240, what=name)
        assert sink.finish(name) != "error", sink.deltas[name][-1].error
        return sink.tokens(name)

    answer = await run("a", prompt(200))
    assert len(answer) == 12
    await eventually(lambda: set(sequence(prompt(200))) <= sink.sequences, what="its events")
    assert await run("b", prompt(200)) == answer
    assert sink.cached("b") == 192
    longer = prompt(200) + array("I", answer[:5]).tobytes()
    assert await run("c", longer, generated=5) == answer[5:]
    await run("tenant", prompt(200), salt=PLAIN ^ 1)
    await eventually(lambda: set(sequence(prompt(200), PLAIN ^ 1)) <= sink.sequences)
    part = f"{'a' * 32}/{'b' * 32}"  # of a tenant, as a caller names one
    for name in ("part", "part again"):
        await run(name, prompt(200), salt=PLAIN ^ 2, tenant=part)
        await eventually(lambda: set(sequence(prompt(200), PLAIN ^ 2)) <= sink.sequences)
    assert (sink.cached("part"), sink.cached("part again")) == (0, 192)
    await run("rows", prompt(40), sampling=Sampling(max_tokens=3, logprobs=2, temperature=0))
    assert all(len(delta.logprobs or []) for delta in sink.deltas["rows"] if delta.tokens)
    assert isinstance(engine, AdapterLoading)
    with pytest.raises(AdapterError, match="the server replied 404"):
        await engine.load_adapter("ghost@1", tmp_path / "ghost")
    await engine.load_adapter("poet@1", make_adapter(tmp_path / "poet"))
    own = salt("tiny", "poet@1")
    assert await run("poet", prompt(200), adapter="poet@1", salt=own) != answer
    await eventually(lambda: set(sequence(prompt(200), own)) <= sink.sequences)
    await run("poet again", prompt(200), adapter="poet@1", salt=own)
    assert (sink.cached("poet"), sink.cached("poet again")) == (0, 192)
    await engine.unload_adapter("poet@1")
    for i in range(12):
        await run(f"flood{i}", prompt(300, first=100 + i))
    await eventually(lambda: sink.removed > 0, what="evictions are reported")
    engine.submit(work("long", prompt(40), max_tokens=400))
    await eventually(lambda: sink.tokens("long"))
    assert engine.abort("long")
    await asyncio.wait_for(engine.drain(), 10)
    server.process.kill()
    await eventually(lambda: sink.errors, timeout=30, what="the server's end is reported")
    await engine.close()
