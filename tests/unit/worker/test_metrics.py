"""Prometheus series of a worker."""

from prometheus_client import CollectorRegistry, generate_latest
from support.loads import LOAD

from kvmesh.bus.messages import Phase, StartSource
from kvmesh.worker.capabilities import HandoffCounts
from kvmesh.worker.metrics import (
    HandoffCollector,
    LoadCollector,
    SourceCollector,
    StartCollector,
    WorkerLabels,
)


def test_metrics_show_the_load_of_each_rank() -> None:
    registry = CollectorRegistry()
    registry.register(LoadCollector(WorkerLabels("m", "w"), lambda: [LOAD]))
    text = generate_latest(registry).decode()
    for line in (
        "kvmesh_worker_running_requests{%s} 3.0",
        "kvmesh_worker_step_seconds{%s} 0.5",
        "kvmesh_worker_output_tokens_total{%s} 14.0",
        "kvmesh_worker_requests_total{%s} 15.0",
    ):
        assert line % 'model="m",rank="1",worker="w"' in text


def test_metrics_show_the_phases_of_the_start() -> None:
    registry = CollectorRegistry()
    phases = [Phase("imports", 9.5), Phase("KV allocation", 2.0)]
    registry.register(StartCollector(WorkerLabels("m", "w"), lambda: phases))
    name, labels = "kvmesh_worker_start_seconds", {"model": "m", "worker": "w"}
    assert registry.get_sample_value(name, labels | {"phase": "imports"}) == 9.5
    assert registry.get_sample_value(name, labels | {"phase": "KV allocation"}) == 2.0


def test_metrics_show_the_sources_of_weights_and_code() -> None:
    registry, labels = CollectorRegistry(), {"model": "m", "worker": "w"}
    sources = [StartSource("weights", "workers", 5), StartSource("weights", "disk", 3)]
    registry.register(SourceCollector(WorkerLabels("m", "w"), lambda: sources))
    of_weights = labels | {"part": "weights"}
    name, hit = "kvmesh_worker_start_bytes", "kvmesh_worker_compile_cache_hit"
    assert registry.get_sample_value(name, of_weights | {"source": "workers"}) == 5
    assert registry.get_sample_value(name, of_weights | {"source": "disk"}) == 3
    assert registry.get_sample_value(hit, labels) is None, "without a cache"
    sources.append(StartSource("code", "compiled"))
    assert registry.get_sample_value(hit, labels) == 0
    sources[-1] = StartSource("code", "workers", 7)
    assert registry.get_sample_value(hit, labels) == 1


def test_handoffs_have_the_labels_of_a_workers_other_series() -> None:
    counts = HandoffCounts(ended={("fetched", "tcp"): 2, ("offered", "failed"): 0}, fetched_bytes=9)
    registry, labels = CollectorRegistry(), {"model": "m", "worker": "w"}
    registry.register(HandoffCollector(WorkerLabels("m", "w"), lambda: counts))

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, labels | more)

    assert value("kvmesh_worker_handoffs_total", side="fetched", result="tcp") == 2
    assert value("kvmesh_worker_handoffs_total", side="offered", result="failed") == 0
    assert value("kvmesh_worker_handoff_bytes_total") == 9


def test_an_engine_without_handoffs_has_no_series_of_them() -> None:
    assert list(HandoffCollector(WorkerLabels("m", "w"), lambda: None).collect()) == []
