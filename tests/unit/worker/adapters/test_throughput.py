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


def test_small_steps_say_little_of_how_long_large_ones_take() -> None:
    speed = Throughput()

    def seconds(tokens: int) -> float:
        return 0.02 + tokens / 50_000

    for _ in range(3):
        speed.record(8192, seconds(8192))
        for _ in range(50):
            speed.record(300, seconds(300))
    assert speed.value == pytest.approx(8192 / seconds(8192), rel=0.05)


def test_a_slower_engine_is_noticed_after_some_large_steps() -> None:
    speed = Throughput()
    for step_s in (0.2, 0.6):
        for _ in range(20):
            speed.record(8192, step_s)
        assert speed.value == pytest.approx(8192 / step_s, rel=0.25)


@pytest.mark.parametrize(
    ("one", "other", "both"), [(4.0, 4.0, 2.0), (3.0, 6.0, 2.0), (5.0, 0.0, 5.0), (0.0, 0.0, 0.0)]
)
def test_two_steps_in_turn(one: float, other: float, both: float) -> None:
    assert combined_throughput(one, other) == combined_throughput(other, one) == pytest.approx(both)
