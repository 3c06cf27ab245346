"""Readiness of a replica by its lag."""

from kvmesh.indexer.readiness import IndexerReadiness


def test_a_replica_is_not_ready_after_two_lagging_samples_until_half_the_limit() -> None:
    readiness = IndexerReadiness(2.0)
    samples = [0.0, 3.0, 0.5, 3.0, 3.0, 1.5, 1.0, 1.5, 2.5, 0.0]
    answers = [readiness.update(lag) for lag in samples]
    assert answers == [True, True, True, True, False, False, True, True, True, True]


def test_a_replica_that_starts_behind_is_not_ready() -> None:
    readiness = IndexerReadiness(2.0)
    assert not readiness.update(1.5)
    assert readiness.update(0.9)
