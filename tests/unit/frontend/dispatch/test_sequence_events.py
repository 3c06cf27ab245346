"""Ended attempts are retained while the bus may have lost their ends."""

from kvmesh.bus.messages import SeqFree
from kvmesh.frontend.dispatch.sequence_events import REPEATED, RETAIN_S, RecentFrees


def test_recent_frees_are_listed_by_model_in_order() -> None:
    recent = RecentFrees()
    for name, model in (("a", "m"), ("b", "n"), ("c", "m")):
        recent.add(model, SeqFree(name), now=1.0)
    assert recent.batches() == [("m", [SeqFree("a"), SeqFree("c")]), ("n", [SeqFree("b")])]


def test_older_frees_are_forgotten_only_when_asked() -> None:
    recent = RecentFrees()
    recent.add("m", SeqFree("old"), now=1.0)
    recent.add("m", SeqFree("new"), now=1.0 + 2 * RETAIN_S)
    assert len(recent.batches()[0][1]) == 2
    recent.expire(now=1.0 + 2 * RETAIN_S)
    assert recent.batches() == [("m", [SeqFree("new")])]


def test_many_frees_are_split_into_several_messages() -> None:
    recent = RecentFrees()
    for number in range(REPEATED + 1):
        recent.add("m", SeqFree(str(number)), now=1.0)
    assert [len(events) for _, events in recent.batches()] == [REPEATED, 1]
