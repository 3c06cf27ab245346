"""Choice among peers in turn or by the time, without suspected ones."""

from collections import Counter

from kvmesh.bus.discovery.peer_choice import MOST_IN_TURN, TURN_S, Peers


def peers(*names: str) -> Peers:
    made = Peers(limit=1.0)
    for name in names:
        made.joined(name)
    return made


def test_trusted_peers_are_chosen_round_robin() -> None:
    three = peers("a", "b", "c")
    assert [three.choose() for _ in range(6)] == ["b", "c", "a"] * 2


def test_a_suspected_peer_is_left_out_until_it_replies_in_time() -> None:
    two = peers("a", "b")
    assert two.suspect("a")
    assert not two.suspect("a"), "suspected already"
    assert {two.choose() for _ in range(4)} == {"b"}
    assert not two.replied("a", 10.0, took=4.0), "a late reply does not count"
    assert {two.choose() for _ in range(4)} == {"b"}
    assert two.replied("a", 11.0, took=0.5)
    assert {two.choose() for _ in range(4)} == {"a", "b"}


def test_a_suspected_peer_is_chosen_if_no_other_is_left() -> None:
    two = peers("a", "b")
    two.suspect("a")
    two.suspect("b")
    assert not two.trusts_any()
    assert {two.choose() for _ in range(4)} == {"a", "b"}
    assert two.choose({"a", "b"}) is None


def test_suspected_and_busy_peers_are_probed_at_intervals() -> None:
    three = peers("a", "b", "c")
    three.suspect("a")
    assert three.to_probe(1.0, {"b"}) == ["a", "b"]
    assert three.to_probe(1.1, {"b"}) == []
    assert three.to_probe(1.3) == ["a"]


def test_a_peer_without_a_recent_reply_is_silent_and_so_is_one_that_left() -> None:
    one = peers("a")
    one.replied("a", 5.0, took=0.1)
    assert not one.silent("a", 6.0)
    assert one.silent("a", 6.1)
    one.left("a")
    assert one.silent("a", 5.0)
    assert one.choose() is None


def at(turn: float) -> float:
    return 1.8e9 + (turn + 0.5) * TURN_S


def test_all_that_choose_at_one_time_choose_the_same_peer() -> None:
    one, two = peers("a", "b", "c"), peers("c", "b", "a")
    for turn in range(50):
        assert {one.choose_at(at(turn)) for _ in range(5)} == {two.choose_at(at(turn))}


def test_turns_are_divided_evenly_and_have_no_period() -> None:
    three = peers("a", "b", "c")
    turns = Counter(three.choose_at(at(turn)) for turn in range(3000))
    assert all(900 < turns[name] < 1100 for name in "abc")
    each_second = Counter(three.choose_at(at(turn * 60)) for turn in range(300))
    assert all(each_second[name] > 60 for name in "abc")


def test_a_turn_ends_after_a_number_of_choices() -> None:
    three = peers("a", "b", "c")
    chosen = [three.choose_at(at(0)) for _ in range(4 * MOST_IN_TURN)]
    parts = [set(chosen[n * MOST_IN_TURN : (n + 1) * MOST_IN_TURN]) for n in range(4)]
    assert [len(part) for part in parts] == [1] * 4
    assert parts[0] == parts[3]
    assert set().union(*parts) == {"a", "b", "c"}


def test_a_suspected_peer_has_no_turn_and_the_others_keep_theirs() -> None:
    three, two = peers("a", "b", "c"), peers("a", "b", "c")
    two.suspect("b")
    for turn in range(50):
        before, after = three.choose_at(at(turn)), two.choose_at(at(turn))
        assert after == before or (before == "b" and after in ("a", "c"))
        assert three.choose_at(at(turn), {"a", "c"}) == "b"


def test_turns_follow_who_joins_and_leaves() -> None:
    three = peers("a")
    assert three.choose_at(at(0)) == "a"
    three.joined("b")
    assert {three.choose_at(at(turn)) for turn in range(20)} == {"a", "b"}
    three.left("a")
    assert {three.choose_at(at(turn)) for turn in range(20)} == {"b"}
    three.left("b")
    assert three.choose_at(at(20)) is None
