"""Prometheus series of a worker."""

from prometheus_client import CollectorRegistry, generate_latest
from support.loads import LOAD

from kvmesh.worker.metrics import LoadCollector, WorkerLabels


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
