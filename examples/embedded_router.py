"""Routing decisions and generation from a program, on the mesh at KVMESH_NATS_URL."""

import asyncio
import os

from kvmesh import KvRouter
from kvmesh.bus.client import BusOptions

MODEL = "kvmesh-demo"
PROMPT = [5 + n % 90 for n in range(500)]  # token ids


async def main() -> None:
    options = BusOptions(
        url=os.environ.get("KVMESH_NATS_URL", "nats://127.0.0.1:4222"),
        namespace=os.environ.get("KVMESH_NATS_NAMESPACE", "kvmesh"),
        token=os.environ.get("KVMESH_NATS_TOKEN") or None,
    )
    async with KvRouter.connect(MODEL, options) as router:
        worker, rank, overlap = await router.best_worker(PROMPT, request_id="example-1")
        print(f"rank {rank} of {worker} holds {overlap} blocks of the prompt")
        await router.free("example-1")  # counted as running there until now
        tokens = 0
        async for part in router.generate(PROMPT, worker_id=worker):
            tokens += len(part["token_ids"])
        print(f"{worker} generated {tokens} tokens")


asyncio.run(main())
