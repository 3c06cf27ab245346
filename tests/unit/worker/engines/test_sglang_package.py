"""The parts of the installed SGLang that run without a GPU; skipped where SGLang is missing."""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from support.recorder import Recorder
from support.wait import eventually

from kvmesh.demo import model_dir
from kvmesh.hashing import block_hashes
from kvmesh.settings import Settings
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import event_endpoints, rank_endpoint
from kvmesh.worker.engines.sglang.arguments import server_arguments

kv_events = pytest.importorskip("sglang.srt.disaggregation.kv_events", exc_type=ImportError)
TOKENS = list(range(100, 108))
SALT = 0xAB


def stored(medium: str) -> Any:
    return kv_events.BlockStored(
        block_hashes=[-7, 9],
        parent_block_hash=None,
        token_ids=TOKENS,
        block_size=4,
        lora_id=None,
        medium=medium,
        cache_salt=f"tag-kvm{SALT:016x}",
    )


@pytest.mark.parametrize("rank", [0, 1])
async def test_events_of_a_rank_arrive_from_its_publisher(tmp_path: Path, rank: int) -> None:
    endpoints = event_endpoints(tmp_path)
    config = json.dumps({"publisher": "zmq", **endpoints})
    publisher = kv_events.EventPublisherFactory.create(config, attn_dp_rank=rank)
    sink = Recorder()
    ledger = CacheLedger(4, PromptSalts("m", 4).root_salt, counted=False)
    feed = EventFeed(
        rank,
        ledger,
        sink,
        rank_endpoint(endpoints["endpoint"], rank),
        rank_endpoint(endpoints["replay_endpoint"], rank),
    )
    # published before the subscription, so that it comes by replay
    events = [stored(kv_events.StorageMedium.GPU), stored(kv_events.StorageMedium.CPU)]
    publisher.publish(kv_events.EventBatch(ts=0.0, events=events))
    feed.start()
    try:
        hashes = set(array("Q", block_hashes(array("I", TOKENS).tobytes(), 4, SALT)[1]))
        await eventually(lambda: sink.sequences == hashes and len(sink.below.get(1, ())) == 2)
        removed = kv_events.BlockRemoved(block_hashes=[9], medium=kv_events.StorageMedium.GPU)
        publisher.publish(kv_events.EventBatch(ts=1.0, events=[removed]))
        await eventually(lambda: len(sink.held[rank]) == 1)
        publisher.publish(kv_events.EventBatch(ts=2.0, events=[kv_events.AllBlocksCleared()]))
        await eventually(lambda: not sink.held[rank] and not len(ledger))
    finally:
        await feed.close()
        await asyncio.to_thread(publisher.shutdown)


@pytest.mark.parametrize("serves", ["aggregated", "prefill", "decode"])
def test_the_arguments_are_those_of_sglang(serves: Any) -> None:
    arguments_of = pytest.importorskip("sglang.srt.server_args", exc_type=ImportError).ServerArgs
    settings = Settings(worker=WorkerSettings(engine="sglang", serves=serves))
    arguments = server_arguments(settings, model_dir())
    given = arguments_of(**arguments)
    assert {key: getattr(given, key) for key in arguments} == arguments
    with pytest.raises(TypeError, match="no_such"):
        arguments_of(**arguments, no_such=1)
