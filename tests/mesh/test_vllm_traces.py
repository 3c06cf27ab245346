"""The connector in vLLM's process takes part in the trace of a request; off, it costs nothing."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from msgspec.structs import replace
from support.collector import Collector, ReceivedSpan
from support.ended import Ended
from support.small_kvbm import KEY, SmallKvbm
from support.wait import eventually

from kvmesh._native import xxh3
from kvmesh.blocks.digests import chain_digests, root_digest, split_digests
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Fetch, Finish, KvLayout, LayerLayout, Offer
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing import names, tracer
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, export_bus_options
from kvmesh.worker.engines.vllm.kvbm.lookups import SchedulerBridge
from kvmesh.worker.engines.vllm.kvbm.parts import KvGroup, KvParts
from kvmesh.worker.engines.vllm.kvbm.staging import RowStaging
from kvmesh.worker.engines.vllm.kvbm.writer import WorkerBridge

LAYOUT = KvLayout(
    weights="w", dtype="float32", item_bytes=4, block_size=4, layers=[LayerLayout(1, 4, 4)]
)
PARTS = KvParts(
    block_size=4, groups=[KvGroup(index=0, layers=["l"], layout=LAYOUT)], shards=1, replicas=1
)
TOKENS = array("I", range(12))
TRACE, ATTEMPT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ORIGIN = RequestOrigin(request="r", salt=0, traceparent=f"00-{TRACE}-{ATTEMPT}-01")


@pytest_asyncio.fixture
async def kvbm(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[SmallKvbm]:
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    yield kvbm
    await kvbm.stop()


@pytest_asyncio.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    runner = await collector.serve()
    yield collector
    await runner.cleanup()


@pytest.fixture
def options(bus: Bus, kvbm: SmallKvbm, collector: Collector) -> BridgeOptions:
    export_bus_options(bus.options)
    return BridgeOptions(
        weights="w",
        node=kvbm.node,
        instance="vllm",
        model="m",
        lease_s=10.0,
        wait_s=0.0,
        queue=100,
        flush_s=30.0,
        tracing=TracingSettings(endpoint=collector.url, protocol="http"),
    )


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    left = tracer.is_installed()
    tracer.install(None)
    assert not left


def hold_prompt(kvbm: SmallKvbm) -> None:
    """Give the kvbm the prompt's three blocks, of zeros."""
    packed = chain_digests(KEY, root_digest(KEY, "m", "", "", LAYOUT), TOKENS.tobytes(), 4)
    size = LAYOUT.block_bytes
    for place, digest in enumerate(split_digests(packed)):
        kvbm.blocks[digest] = (place * size, xxh3(bytes(size)))


async def load(lookups: SchedulerBridge, kvbm: SmallKvbm, origin: RequestOrigin) -> None:
    """Look the prompt up, as the scheduler of vLLM does, and load two of its three blocks."""
    await eventually(lambda: lookups.is_attached, what="it attaches")
    await eventually(lambda: lookups.lookup("v", origin, TOKENS, 0) == 3)
    found = lookups.begin_copy("v")
    assert found is not None
    found.loaded = [2]
    lookups.release_lookup("v")
    await eventually(lambda: kvbm.count(Finish) >= 1, what="the blocks are given back")


async def write(worker: WorkerBridge) -> None:
    """Write the prompt's three blocks through, as a worker of vLLM does."""
    await eventually(lambda: worker.is_attached, what="it attaches")
    size = LAYOUT.block_bytes
    rows = RowStaging(3, size, size, page_locked=False).take(3)
    assert rows is not None
    rows.copied = Ended()
    worker.extend_prompt("v", ORIGIN, TOKENS)
    worker.write_through("v", [(0, rows)])
    await eventually(lambda: worker.counts == (3, 0), what="three blocks are written")


def only(collector: Collector, name: str) -> ReceivedSpan:
    (span,) = collector.named(name)
    return span


async def test_loads_and_writes_are_below_the_attempt(
    options: BridgeOptions, kvbm: SmallKvbm, collector: Collector
) -> None:
    lookups = await asyncio.to_thread(SchedulerBridge, options, PARTS)
    worker = await asyncio.to_thread(WorkerBridge, options, PARTS, 0, torch.device("cpu"))
    hold_prompt(kvbm)
    await load(lookups, kvbm, ORIGIN)
    kvbm.blocks.clear()
    await write(worker)
    # the process of a scheduler and a worker has one tracer, until both are closed
    await asyncio.to_thread(lookups.close)
    assert tracer.is_installed()
    await asyncio.to_thread(worker.close)
    await eventually(lambda: len(collector.spans) == 2, what="both spans")
    spans = {name: only(collector, name) for name in (names.ONBOARD, names.OFFLOAD)}
    for span in spans.values():
        assert (span.trace, span.parent, span.failed) == (TRACE, ATTEMPT, False)
        assert span.service == "kvmesh-worker"
    assert spans[names.ONBOARD].attributes[names.TIERS] == [0, 8]
    assert spans[names.OFFLOAD].attributes[names.BLOCKS] == 3
    prompts = [m for m in kvbm.requests if isinstance(m, Fetch | Offer)]
    assert {message.traceparent for message in prompts} == {ORIGIN.traceparent}


async def test_an_untraced_request_and_untraced_processes_record_nothing(
    options: BridgeOptions, kvbm: SmallKvbm, collector: Collector
) -> None:
    hold_prompt(kvbm)
    lookups = await asyncio.to_thread(SchedulerBridge, options, PARTS)
    await load(lookups, kvbm, replace(ORIGIN, traceparent=""))
    await asyncio.to_thread(lookups.close)
    off = replace(options, tracing=None)
    lookups = await asyncio.to_thread(SchedulerBridge, off, PARTS)
    assert not tracer.is_installed()
    await load(lookups, kvbm, ORIGIN)
    await asyncio.to_thread(lookups.close)
    assert collector.spans == []
    fetches = [m.traceparent for m in kvbm.requests if isinstance(m, Fetch)]
    assert fetches == ["", ORIGIN.traceparent]  # the kvbm may trace all the same
