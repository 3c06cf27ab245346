"""Prometheus series of a worker."""

from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.bus.messages import (
    Load,
)
from kvmesh.worker.metrics import LoadCollector

LOAD = Load(
    instance="w",
    rank=1,
    running=3,
    waiting=2,
    active_blocks=40,
    cached_blocks=50,
    total_blocks=100,
    prefill_tokens=7,
    steps=11,
    prompt_tokens=12,
    cached_tokens=13,
    output_tokens=14,
    requests=15,
    step_s=0.5,
)


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
