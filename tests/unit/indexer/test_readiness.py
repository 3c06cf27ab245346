"""When a replica answers, how its lag is told, and when a snapshot is due."""

import pytest

from kvmesh.bus.streams import StreamLimits
from kvmesh.indexer.feed import Lag
from kvmesh.indexer.readiness import IndexerReadiness
from kvmesh.indexer.snapshots.snapshotter import SnapshotThresholds
from kvmesh.settings.schema import IndexerSettings


def test_a_replica_leaves_when_it_lags_for_two_samples_and_returns_at_half_the_limit() -> None:
    readiness = IndexerReadiness(2.0)
    samples = [0.0, 3.0, 0.5, 3.0, 3.0, 1.5, 1.0, 1.5, 2.5, 0.0]
    answers = [readiness.update(lag) for lag in samples]
    assert answers == [True, True, True, True, False, False, True, True, True, True]


def test_a_replica_that_starts_behind_is_not_ready() -> None:
    readiness = IndexerReadiness(2.0)
    assert not readiness.update(1.5)
    assert readiness.update(0.9)


@pytest.mark.parametrize("skew", [0.0, 1000.0, -1000.0])
def test_lag_does_not_depend_on_the_clocks_agreeing(skew: float) -> None:
    lag = Lag()
    assert lag.seconds(10.0, pending=0) == 0
    lag.note(stored=10.0 + skew, now=10.001)
    assert lag.seconds(10.002, pending=0) == 0
    lag.note(stored=11.0 + skew, now=14.001)
    assert lag.seconds(14.002, pending=0) == pytest.approx(3.0, abs=0.1)
    lag.note(stored=15.0 + skew, now=15.001)
    assert lag.seconds(15.002, pending=0) == 0


def test_lag_ends_with_silence_unless_the_server_says_that_more_waits() -> None:
    lag = Lag()
    lag.note(stored=10.0, now=10.0)
    lag.note(stored=11.0, now=14.0)
    assert lag.seconds(14.2, pending=0) == 0
    assert lag.seconds(16.0, pending=1) == pytest.approx(5.0, abs=0.1)


def test_old_history_is_not_lag() -> None:
    lag = Lag()
    lag.note(stored=0.0, now=5000.0)
    assert lag.seconds(5000.0, pending=0) == 0
    lag.note(stored=5001.0, now=5001.0)
    assert lag.seconds(5001.0, pending=0) == 0


def test_a_clock_that_was_set_back_is_forgotten_in_time() -> None:
    lag = Lag()
    lag.note(stored=0.0, now=0.0)
    for now in range(1, 60):
        lag.note(stored=now - 1.0, now=float(now))
    assert lag.seconds(59.0, pending=0) == 0


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
    settings = IndexerSettings(snapshot_bytes=1 << 30, snapshot_age_s=3600)
    thresholds = SnapshotThresholds.of(settings, StreamLimits(kv_bytes=100 << 20, kv_age_s=60.0))
    assert thresholds.bytes == 25 << 20
    assert thresholds.age_s == 15.0
