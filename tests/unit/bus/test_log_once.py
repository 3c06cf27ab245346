"""LogOnce limits repeated messages, in bounded memory."""

from kvmesh.bus.log_once import LogOnce


def test_each_key_is_logged_once_up_to_the_limit() -> None:
    once = LogOnce(limit=2)
    logged = [once.first(*key) for key in (("a", "x"), ("a", "x"), ("a", "y"), ("b", "x"))]
    assert logged == [True, False, True, False]
