"""Subjects that NATS refuses to the connections in vLLM's processes: their worker has them."""

import asyncio
from dataclasses import replace
from pathlib import Path

from support.restricted import RestrictedServer
from support.small_kvbm import SmallKvbm
from support.vllm_bridge import PARTS, TOKENS, attached, origin
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.worker.engines.vllm.kvbm.refused_subjects import refusals_heard


def refused(bus: Bus, *words: str) -> bool:
    text = " ".join(bus.faults.texts(REFUSED))
    return bool(text) and all(word in text for word in words)


async def test_a_connection_in_vllms_processes_tells_its_worker_what_is_refused(
    options: BusOptions, limits: StreamLimits, tmp_path: Path
) -> None:
    (folder := tmp_path / "nats").mkdir()
    server = RestrictedServer(folder)
    server.forbid()
    server.start()
    own = await Bus.connect(server.options(options), "own")
    await ensure_streams(own, limits)
    kvbm = SmallKvbm(own, limits, tmp_path)
    await kvbm.start()
    asked = f"kvm.{options.namespace}.kvbm.>"
    async with refusals_heard(tmp_path, own.refusals.add):
        its = replace(own.options, inbox_prefix="_INBOX_vllm")
        lookups = await attached(its, kvbm.node, PARTS)
        server.forbid(publish=[asked])

        async def told() -> bool:
            lookups.lookup("r", origin("r"), TOKENS, 0)
            return refused(own, f"publish on kvm.{options.namespace}.kvbm.")

        await eventually(told)
        server.forbid()
        await eventually(lambda: not own.faults.texts(REFUSED), what="it heals")
        server.forbid(subscribe=["_INBOX_vllm.>"])
        await eventually(lambda: refused(own, "receive replies", "_INBOX_vllm"))
        await asyncio.to_thread(lookups.close)
        await eventually(lambda: not own.faults.texts(REFUSED), what="it ends with its process")
    await kvbm.stop()
    await own.close()
    server.stop()
