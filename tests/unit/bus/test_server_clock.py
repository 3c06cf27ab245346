"""The server's time, as messages tell it."""

from kvmesh.bus.server_clock import WINDOW_S, ServerClock


def test_a_clock_that_agrees_is_taken_as_it_is() -> None:
    clock = ServerClock()
    assert clock.time(100.0) == 100.0
    clock.heard(99.9, 100.0)
    assert clock.time(101.0) == 101.0


def test_the_fastest_message_tells_the_difference() -> None:
    for ahead in (3600.0, -3600.0):
        clock = ServerClock()
        clock.heard(1000.0 + ahead - 5.0, 1000.0)  # five seconds on its way
        clock.heard(1010.0 + ahead, 1010.0)
        clock.heard(1020.0 + ahead - 1.0, 1020.0)
        assert clock.time(1021.0) == 1021.0 + ahead


def test_a_clock_that_is_set_is_followed() -> None:
    clock = ServerClock()
    clock.heard(1000.0, 1000.0)
    for step in range(3):  # this machine's clock was set an hour ahead
        now = 4600.0 + step * (WINDOW_S + 1)
        clock.heard(now - 3600.0, now)
    assert clock.time(5000.0) == 1400.0
    clock.heard(1001.0, 501.0)  # and back, by more
    clock.heard(1040.0, 501.0 + WINDOW_S + 9.0)
    assert clock.time(600.0) == 1100.0
