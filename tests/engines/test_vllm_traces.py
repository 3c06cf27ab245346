"""Spans of a real vLLM, and of kvmesh's connector in its process, are parts of the trace."""

import asyncio
from itertools import count
from pathlib import Path

import pytest
from mesh.test_traces import arrived, instance, post, trace_id
from support.collector import Collector
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, ControlReply, MessageDecoder
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


async def test_blocks_of_lower_tiers_are_parts_of_the_trace(
    nats_server: NatsServer, tmp_path: Path, tiny_model: Path
) -> None:
    collector = Collector()
    runner = await collector.serve()
    env = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(tiny_model),
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_VLLM_KVBM": "true",
        "KVMESH_VLLM_ARGS": "enforce_eager=true,num_gpu_blocks_override=64,max_model_len=1024",
        "KVMESH_KVBM_DIRECTORY": str(tmp_path / "node"),
        "KVMESH_KVBM_HOST_BYTES": str(32 << 20),
        **collector.env,
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    mesh.start("kvbm", "kvbm-0")
    mesh.start_all(workers=1)
    body = {"model": "tiny", "prompt": "Tell it. " * 40, "max_tokens": 8}
    numbers = count(1)

    async def complete() -> int:
        number = next(numbers)
        parent = f"00-{trace_id(number)}-00f067aa0ba902b7-01"
        assert await post(mesh, "/v1/completions", body, parent) is not None
        return number

    try:
        await mesh.ready(START_S)
        bus = await Bus.connect(mesh.options, "test")
        subject = bus.subjects.ctl(instance(mesh, "worker-0"))
        replies = MessageDecoder(ControlReply)

        async def clear() -> None:
            assert (await bus.request(subject, Clear(tiers=[0]), replies, PATIENCE_S)).ok

        async def stored() -> bool:
            """True once a request has written blocks: the connector attaches in the background."""
            await clear()
            await complete()
            return bool(collector.named(names.OFFLOAD))

        async def loaded() -> int:
            """The number of a request that has loaded blocks; vLLM clears when it is idle."""
            await clear()
            number = await complete()
            spans = await arrived(collector, number, names.ONBOARD, names.KVBM_FETCH)
            (onboard,) = (span for span in spans if span.name == names.ONBOARD)
            return number if sum(onboard.attributes[names.TIERS]) else 0

        await eventually(stored, what="blocks are written through")
        number = await eventually(loaded, what="blocks are loaded")
        await bus.close()
        spans = await arrived(collector, number, names.ONBOARD, names.KVBM_FETCH)
        (attempt,) = (span for span in spans if span.name == names.ATTEMPT)
        (onboard,) = (span for span in spans if span.name == names.ONBOARD)
        (offload, *_) = collector.named(names.OFFLOAD)
        (fetch,) = (span for span in spans if span.name == names.KVBM_FETCH)
        assert onboard.parent == fetch.parent == attempt.id
        assert onboard.service == offload.service == "kvmesh-worker"
        assert onboard.start <= fetch.start <= fetch.end <= onboard.end
        assert collector.named(names.KVBM_OFFER)
    finally:
        await asyncio.to_thread(mesh.stop)
        await runner.cleanup()
