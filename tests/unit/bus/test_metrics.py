"""Figures of the connection to NATS."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.bus.metrics import BusCollector, BusCounts


def test_the_collector_shows_traffic_counts_and_streams() -> None:
    bus: Any = SimpleNamespace(
        connected=True,
        unsent=2,
        kv_backlog_bytes=64,
        client=SimpleNamespace(stats={"out_msgs": 3, "out_bytes": 4, "in_msgs": 5, "in_bytes": 6}),
        counts=BusCounts(reconnects=7),
        readers=[SimpleNamespace(stream="kv", pending=8), SimpleNamespace(stream="kv", pending=1)],
    )
    bus.counts.reader_restarts["kv"] = 2
    registry = CollectorRegistry()
    registry.register(BusCollector(bus))
    text = generate_latest(registry).decode()
    for line in (
        "kvmesh_bus_connected 1.0",
        "kvmesh_bus_unsent_messages 2.0",
        "kvmesh_bus_kv_backlog_bytes 64.0",
        "kvmesh_bus_sent_messages_total 3.0",
        "kvmesh_bus_received_bytes_total 6.0",
        "kvmesh_bus_reconnects_total 7.0",
        'kvmesh_bus_pending_messages{stream="kv"} 9.0',
        'kvmesh_bus_reader_restarts_total{stream="kv"} 2.0',
        'kvmesh_bus_stream_resets_total{stream="kv"} 0.0',
    ):
        assert line in text


def test_without_a_bus_there_are_families_and_no_samples() -> None:
    assert [metric for metric in BusCollector(None).collect() if metric.samples] == []
