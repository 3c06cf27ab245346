"""Blocks of vLLM that wait for write-through when it stops are written before its process ends."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from support.ended import Ended
from support.small_kvbm import SmallKvbm
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KvLayout, LayerLayout, Offer
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, export_bus_options
from kvmesh.worker.engines.vllm.kvbm.parts import KvGroup, KvParts
from kvmesh.worker.engines.vllm.kvbm.staging import RowStaging
from kvmesh.worker.engines.vllm.kvbm.writer import WorkerBridge

LAYOUT = KvLayout(
    weights="w", dtype="float32", item_bytes=4, block_size=4, layers=[LayerLayout(1, 4, 4)]
)
PARTS = KvParts(
    block_size=4, groups=[KvGroup(index=0, layers=["l"], layout=LAYOUT)], shards=1, replicas=1
)
PROMPTS, BLOCKS = 8, 3


@pytest_asyncio.fixture
async def kvbm(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[SmallKvbm]:
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    yield kvbm
    await kvbm.stop()


async def queue_and_close(bus: Bus, kvbm: SmallKvbm, flush_s: float) -> None:
    """Queue the blocks of several prompts, and stop."""
    export_bus_options(bus.options)
    options = BridgeOptions(
        weights="w",
        node=kvbm.node,
        instance="vllm",
        model="m",
        lease_s=10.0,
        wait_s=0.0,
        queue=100,
        flush_s=flush_s,
    )
    bridge = await asyncio.to_thread(WorkerBridge, options, PARTS, 0, torch.device("cpu"))
    await eventually(lambda: bridge.is_attached, what="it attaches")
    size = LAYOUT.block_bytes
    staging = RowStaging(PROMPTS * BLOCKS, size, size, page_locked=False)
    for number in range(PROMPTS):
        rows = staging.take(BLOCKS)
        assert rows is not None
        rows.copied = Ended()
        name, first = f"r{number}", 100 * number
        origin = RequestOrigin(
            request=name, salt=0, adapter="", tenant="", session=None, retention=[]
        )
        bridge.extend_prompt(f"v{name}", origin, array("I", range(first, first + 4 * BLOCKS)))
        bridge.write_through(f"v{name}", [(0, rows)])
    await asyncio.to_thread(bridge.close)


async def test_what_waits_is_written_before_vllm_ends(bus: Bus, kvbm: SmallKvbm) -> None:
    await queue_and_close(bus, kvbm, flush_s=30.0)
    await eventually(lambda: len(kvbm.blocks) == PROMPTS * BLOCKS)
    offered = {message.request for message in kvbm.requests if isinstance(message, Offer)}
    assert offered == {f"r{number}" for number in range(PROMPTS)}  # the mesh's ids, not vLLM's


async def test_the_time_is_bounded(
    bus: Bus, kvbm: SmallKvbm, caplog: pytest.LogCaptureFixture
) -> None:
    kvbm.silent = {Offer}
    await asyncio.wait_for(queue_and_close(bus, kvbm, flush_s=0.1), 30)
    assert kvbm.blocks == {}
    assert f"{PROMPTS * BLOCKS} blocks did not reach a lower tier in 0.1 s" in caplog.text
