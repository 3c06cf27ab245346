"""Lag of the feed."""

import pytest

from kvmesh.indexer.feed import Lag


@pytest.mark.parametrize("skew", [0.0, 1000.0, -1000.0])
def test_lag_does_not_depend_on_clock_skew(skew: float) -> None:
    lag = Lag()
    assert lag.seconds(10.0, pending=0) == 0
    lag.note(stored=10.0 + skew, now=10.001)
    assert lag.seconds(10.002, pending=0) == 0
    lag.note(stored=11.0 + skew, now=14.001)
    assert lag.seconds(14.002, pending=0) == pytest.approx(3.0, abs=0.1)
    lag.note(stored=15.0 + skew, now=15.001)
    assert lag.seconds(15.002, pending=0) == 0


def test_lag_ends_with_silence_unless_messages_are_pending() -> None:
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
