"""Replies to queries for weights."""

from kvmesh.weights.process.offers import draw
from kvmesh.weights.process.search import SHARES


def test_each_share_has_its_part_of_the_workers() -> None:
    draws = [draw("query", f"worker-{n}") for n in range(4000)]
    assert all(0 <= each < 1 for each in draws)
    for share in SHARES:
        replies = sum(each < share for each in draws)
        assert abs(replies - share * 4000) < 0.25 * share * 4000 + 1
    assert draw("query", "worker-0") != draw("another", "worker-0")
