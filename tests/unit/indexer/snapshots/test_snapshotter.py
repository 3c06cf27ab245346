"""Thresholds of a due snapshot."""

import pytest

from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.indexer.snapshots.snapshotter import SnapshotThresholds
from kvmesh.settings.schema import IndexerSettings


@pytest.mark.parametrize(
    ("messages", "size", "age", "due"),
    [
        (999, 0.0, 0.0, False),
        (1000, 0.0, 0.0, True),
        (0, 0.0, 1e9, False),
        (1, 0.0, 61.0, True),
        (1, 5000.0, 0.0, True),
        (1, 4999.0, 59.0, False),
    ],
)
def test_a_snapshot_is_due_by_messages_bytes_or_age(
    messages: int, size: float, age: float, due: bool
) -> None:
    assert SnapshotThresholds(1000, 5000, 60.0).due(messages, size, age) is due


def test_a_snapshot_is_due_well_before_the_stream_drops_messages() -> None:
    settings = IndexerSettings(snapshot_age_s=3600)
    thresholds = SnapshotThresholds.of(settings, StreamLimits(kv_bytes=100 << 20, kv_age_s=60.0))
    assert thresholds.bytes == 25 << 20
    assert thresholds.age_s == 15.0
