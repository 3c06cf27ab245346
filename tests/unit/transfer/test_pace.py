"""The bound of what is sent to others."""

import pytest

from kvmesh.transfer import SendingPace


def test_bytes_beyond_the_rate_wait() -> None:
    pace = SendingPace(1000)
    assert pace.piece(10.0) == 1024
    assert pace.delay(100, 10.0) == 0.0
    assert pace.delay(500, 10.0) == 0.0
    assert pace.delay(100, 10.0) == pytest.approx(0.5)
    assert pace.backlog(10.0) == pytest.approx(0.6)
    assert pace.delay(100, 20.0) == 0.0
    assert pace.sent == 800


def test_without_a_rate_nothing_waits() -> None:
    pace = SendingPace()
    assert [pace.delay(1 << 40, 0.0), pace.backlog(0.0)] == [0.0, 0.0]
    assert pace.sent == 1 << 40


def test_the_rate_holds_over_time() -> None:
    pace, now = SendingPace(1e6), 100.0
    for _ in range(1000):
        now += pace.delay(10_000, now)
    assert now - 100.0 == pytest.approx(10.0, abs=0.2)


def test_another_bound_may_change_at_any_time() -> None:
    bounds = {0.0: 0.0, 1.0: 100.0, 2.0: 4000.0}
    pace, free = SendingPace(1000, bounds.__getitem__), SendingPace(0, bounds.__getitem__)
    assert [pace.rate(now) for now in bounds] == [1000, 100, 1000]
    assert [free.rate(now) for now in bounds] == [0, 100, 4000]
    assert free.piece(0.0) > free.piece(2.0)
    assert free.delay(1 << 30, 0.0) == 0.0
    assert free.is_soon(1 << 30, 0.0)
    assert not free.is_soon(100, 1.0)
    assert free.delay(200, 1.0) == 0.0
    assert free.delay(10, 2.0) == pytest.approx(0.9)
