"""Measured throughput of an engine."""

import pytest

from kvmesh.worker.adapters.throughput import Throughput, combined_throughput


def test_throughput_follows_the_measurements() -> None:
    speed = Throughput()
    assert speed.value == 0.0
    speed.record(100, 2.0)
    assert speed.value == 50.0
    speed.record(100, 1.0)
    assert 50.0 < speed.value < 100.0
    for units, seconds in ((0, 1.0), (5, 0.0)):
        before = speed.value
        speed.record(units, seconds)
        assert speed.value == before


@pytest.mark.parametrize(
    ("one", "other", "both"), [(4.0, 4.0, 2.0), (3.0, 6.0, 2.0), (5.0, 0.0, 5.0), (0.0, 0.0, 0.0)]
)
def test_two_steps_in_turn(one: float, other: float, both: float) -> None:
    assert combined_throughput(one, other) == combined_throughput(other, one) == pytest.approx(both)
