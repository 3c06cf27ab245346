"""Round-robin choice among peers, without suspected ones."""

from kvmesh.bus.discovery.peer_choice import Peers


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
