"""Shares of a rank's device time."""

from random import Random

import pytest

from kvmesh.worker.requests.device_time import DeviceTime


def test_a_rank_s_time_is_divided_among_its_sequences() -> None:
    time = DeviceTime(devices=2)
    first = time.begin(0, 10.0)
    second = time.begin(0, 11.0)  # the first was alone for a second
    assert time.since(0, first, 12.0) == pytest.approx(2 * 1.5)
    assert time.end(0, first, 13.0) == pytest.approx(2 * 2.0)
    third = time.begin(1, 13.0)  # on another rank
    assert time.end(0, second, 15.0) == pytest.approx(2 * 3.0)
    assert time.end(1, third, 15.0) == pytest.approx(2 * 2.0)


def test_shares_add_up_to_the_time_with_any_sequence() -> None:
    random, time, now, busy = Random(1), DeviceTime(), 0.0, 0.0
    live: list[float] = []
    total = 0.0
    for _ in range(500):
        step = random.random()
        now, busy = now + step, busy + (step if live else 0.0)
        if live and random.random() < 0.5:
            total += time.end(0, live.pop(random.randrange(len(live))), now)
        else:
            live.append(time.begin(0, now))
    total += sum(time.end(0, start, now) for start in live)
    assert total == pytest.approx(busy)


def test_a_sequence_without_an_end_time_leaves_at_the_last_event() -> None:
    time = DeviceTime()
    start = time.begin(0, 1.0)
    time.since(0, start, 3.0)
    assert time.end(0, start) == pytest.approx(2.0)
    assert time.end(0, time.begin(0, 9.0), 9.5) == pytest.approx(0.5)
