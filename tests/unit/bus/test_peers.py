"""Which process is asked: those that answer take turns, silent and late ones sit out."""

from kvmesh.bus.peer_choice import Peers


def peers(*names: str) -> Peers:
    made = Peers(limit=1.0)
    for name in names:
        made.joined(name)
    return made


def test_those_that_answer_take_turns() -> None:
    three = peers("a", "b", "c")
    assert [three.choose() for _ in range(6)] == ["b", "c", "a"] * 2


def test_a_suspected_one_is_left_out_until_it_answers_in_time() -> None:
    two = peers("a", "b")
    assert two.suspect("a")
    assert not two.suspect("a"), "that is known"
    assert {two.choose() for _ in range(4)} == {"b"}
    assert not two.heard("a", 10.0, took=4.0), "too late to be of use"
    assert {two.choose() for _ in range(4)} == {"b"}
    assert two.heard("a", 11.0, took=0.5)
    assert {two.choose() for _ in range(4)} == {"a", "b"}


def test_where_all_are_suspected_one_of_them_is_asked_all_the_same() -> None:
    two = peers("a", "b")
    two.suspect("a")
    two.suspect("b")
    assert not two.trusts_any()
    assert {two.choose() for _ in range(4)} == {"a", "b"}
    assert two.choose({"a", "b"}) is None


def test_the_suspected_and_the_busy_are_probed_now_and_then() -> None:
    three = peers("a", "b", "c")
    three.suspect("a")
    assert three.to_probe(1.0, {"b"}) == ["a", "b"]
    assert three.to_probe(1.1, {"b"}) == []
    assert three.to_probe(1.3) == ["a"]


def test_one_that_was_not_heard_for_long_is_silent_and_so_is_one_that_left() -> None:
    one = peers("a")
    one.heard("a", 5.0, took=0.1)
    assert not one.silent("a", 6.0)
    assert one.silent("a", 6.1)
    one.left("a")
    assert one.silent("a", 5.0)
    assert one.choose() is None
