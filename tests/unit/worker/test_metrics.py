"""Prometheus series of a worker."""

from prometheus_client import CollectorRegistry, generate_latest
from support.loads import LOAD

from kvmesh.worker.metrics import LoadCollector


def test_metrics_show_the_load_of_each_rank() -> None:
    registry = CollectorRegistry()
    registry.register(LoadCollector(lambda: [LOAD]))
    text = generate_latest(registry).decode()
    for line in (
        'kvmesh_worker_running{rank="1"} 3.0',
        'kvmesh_worker_step_seconds{rank="1"} 0.5',
        'kvmesh_worker_output_tokens_total{rank="1"} 14.0',
        'kvmesh_worker_requests_total{rank="1"} 15.0',
    ):
        assert line in text
