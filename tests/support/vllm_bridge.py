"""The bridge of vLLM's scheduler to a kvbm, without vLLM."""

import asyncio
from array import array

from kvmesh.bus.client import BusOptions
from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.kvbm import bridge
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions
from kvmesh.worker.engines.vllm.kvbm.lookups import SchedulerBridge
from kvmesh.worker.engines.vllm.kvbm.parts import KvGroup, KvParts
from support.wait import eventually

LAYOUT = KvLayout(
    weights="w", dtype="float32", item_bytes=4, block_size=4, layers=[LayerLayout(1, 4, 4)]
)
TOKENS = array("I", range(12))
PARTS = KvParts(
    block_size=4, groups=[KvGroup(index=0, layers=["l"], layout=LAYOUT)], shards=1, replicas=1
)


def origin(request: str) -> RequestOrigin:
    return RequestOrigin(request=request, salt=0, adapter="", tenant="", session=None, retention=[])


async def attached(bus: BusOptions, node: str, parts: KvParts) -> SchedulerBridge:
    """A bridge that is attached to the kvbm of a node."""
    bridge.export_bus_options(bus)
    options = BridgeOptions(
        weights="w",
        node=node,
        instance="vllm",
        model="m",
        lease_s=10.0,
        wait_s=0.0,
        queue=100,
    )
    lookups = await asyncio.to_thread(SchedulerBridge, options, parts)
    await eventually(lambda: lookups.is_attached, what="it attaches")
    return lookups
