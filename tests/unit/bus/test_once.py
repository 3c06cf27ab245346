"""Nonsense is told of once, in bounded memory."""

from kvmesh.bus.log_once import LogOnce


def test_each_thing_is_said_once_and_only_so_many() -> None:
    once = LogOnce(limit=2)
    said = [once.first(*thing) for thing in (("a", "x"), ("a", "x"), ("a", "y"), ("b", "x"))]
    assert said == [True, False, True, False]
