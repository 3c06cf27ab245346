"""Spans of a real vLLM are parts of the request's trace."""

import asyncio
from pathlib import Path

import pytest
from mesh.test_traces import arrived, post, trace_id
from support.collector import Collector
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.tracing import names

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore"),
]
START_S = 400


async def test_the_spans_of_vllm_have_the_attempt_as_their_parent(
    nats_server: NatsServer, tmp_path: Path, tiny_model: Path
) -> None:
    collector = Collector()
    runner = await collector.serve()
    env = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(tiny_model),
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_VLLM_ARGS": "enforce_eager=true,num_gpu_blocks_override=64,max_model_len=1024",
        **collector.env,
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    mesh.start_all(workers=1)
    try:
        await mesh.ready(START_S)
        body = {"model": "tiny", "prompt": "Tell it. " * 40, "max_tokens": 8}
        parent = f"00-{trace_id(7)}-00f067aa0ba902b7-01"
        assert await post(mesh, "/v1/completions", body, parent) is not None
        await arrived(collector, 7, names.ATTEMPT, names.ENGINE_PREFILL, names.ENGINE_DECODE)

        def of_vllm() -> bool:
            spans = collector.traces()[trace_id(7)]
            return any(not span.service.startswith("kvmesh") for span in spans)

        await eventually(of_vllm, what="a span of vLLM")
        spans = await arrived(collector, 7)
        attempts = {span.id for span in spans if span.name == names.ATTEMPT}
        theirs = [span for span in spans if not span.service.startswith("kvmesh")]
        assert {span.parent for span in theirs} <= attempts | {span.id for span in theirs}
        # an untraced request has no trace of vLLM's own
        known = set(collector.traces())
        await post(mesh, "/v1/completions", body, f"00-{trace_id(8)}-00f067aa0ba902b7-00")
        await post(mesh, "/v1/completions", body, f"00-{trace_id(9)}-00f067aa0ba902b7-01")
        await arrived(collector, 9, names.ENGINE_DECODE)
        assert set(collector.traces()) - known == {trace_id(9)}
    finally:
        await asyncio.to_thread(mesh.stop)
        await runner.cleanup()
