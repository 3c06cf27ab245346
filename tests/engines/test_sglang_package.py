"""SGLang's own publisher, arguments, requests and metrics, without a GPU: `make sglang`."""

import asyncio
import json
from array import array
from importlib import import_module
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.recorder import Recorder
from support.sglang_cpu import prepare
from support.wait import eventually

from kvmesh.bus.messages import Guided, Sampling, Work
from kvmesh.demo import model_dir
from kvmesh.hashing import block_hashes
from kvmesh.settings import Settings
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import event_endpoints, rank_endpoint
from kvmesh.worker.adapters.sglang_fields import request_fields
from kvmesh.worker.engines.remote.gauges import gauges_of
from kvmesh.worker.engines.sglang.arguments import server_arguments

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
TOKENS = list(range(100, 108))
SALT = 0xAB


@pytest.fixture(scope="module")
def kv_events() -> Any:
    prepare()
    return import_module("sglang.srt.disaggregation.kv_events")


def stored(kv_events: Any, medium: str) -> Any:
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
async def test_events_of_a_rank_arrive_from_its_publisher(
    kv_events: Any, tmp_path: Path, rank: int
) -> None:
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
    events = [
        stored(kv_events, m) for m in (kv_events.StorageMedium.GPU, kv_events.StorageMedium.CPU)
    ]
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
    prepare()
    arguments_of = import_module("sglang.srt.server_args").ServerArgs
    settings = Settings(worker=WorkerSettings(engine="sglang", serves=serves))
    arguments = server_arguments(settings, model_dir())
    given = arguments_of(**arguments)
    assert {key: getattr(given, key) for key in arguments} == arguments
    with pytest.raises(TypeError, match="no_such"):
        arguments_of(**arguments, no_such=1)


def test_sglang_takes_every_field_of_a_request() -> None:
    prepare()
    requests = import_module("sglang.srt.managers.io_struct").GenerateReqInput
    parameters = import_module("sglang.srt.sampling.sampling_params").SamplingParams
    guided = [
        None,
        Guided(kind="json_object", value=""),
        Guided(kind="json_schema", value='{"type": "array"}'),
        Guided(kind="regex", value="a+"),
        Guided(kind="grammar", value='root ::= "a"'),
        Guided(kind="choice", value='["a", "b.c"]'),
        Guided(kind="structural_tag", value='{"type": "structural_tag"}'),
    ]
    for kind in guided:
        sampling = Sampling(
            max_tokens=7, seed=3, logprobs=2, logit_bias={5: 1.0}, stop_token_ids=[9], guided=kind
        )
        work = Work(
            request="r",
            frontend="f",
            tokens=array("I", TOKENS).tobytes(),
            sampling=sampling,
            salt=SALT,
            tenant="acme",
            adapter="lora-a",
        )
        fields = request_fields(work, TOKENS, "acme-tag")
        request = requests(**fields)
        request.normalize_batch_and_arguments()
        assert request.cache_salt == request.extra_key == "acme-tag"
        found = parameters(**request.sampling_params)
        found.normalize(tokenizer=None)
        found.verify(vocab_size=1000)
        assert (found.max_new_tokens, found.sampling_seed) == (7, 3)


def test_the_load_is_that_of_sglangs_metrics() -> None:
    """With priorities SGLang has a series of each beside the total."""
    prepare()
    metrics = import_module("sglang.srt.observability.metrics_collector")
    context = import_module("sglang.srt.runtime_context").get_context()
    names = ["model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "priority"]
    labels = dict.fromkeys(names, "") | {"model_name": "m"}
    with context.override_server_args(enable_priority_scheduling=True):
        collector = metrics.SchedulerMetricsCollector(labels, context.server_args)
    stats = metrics.SchedulerStats()
    stats.num_running_reqs = metrics.QueueCount(37, {0: 36, 5: 1})
    stats.num_queue_reqs = metrics.QueueCount(80, {0: 80, 5: 0})
    collector.log_stats(stats)
    page = prometheus_client.generate_latest().decode()
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]
    gauges = gauges_of(samples, "m")
    assert (gauges.running, gauges.waiting) == (37, 80)


def test_requests_are_preempted_at_a_difference_of_ten() -> None:
    prepare()
    arguments = import_module("sglang.srt.server_args").ServerArgs
    assert arguments(model_path="m").priority_scheduling_preemption_threshold == 10
