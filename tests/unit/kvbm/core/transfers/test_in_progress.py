"""Announcements of the blocks that requests compute."""

from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress


def test_the_first_request_to_announce_a_block_computes_it() -> None:
    in_progress = BlocksInProgress(5.0)
    in_progress.add((1, "a"), [b"x", b"y"], 0.0)
    in_progress.add((2, "b"), [b"y", b"z"], 0.0)
    assert [in_progress.request_of(d) for d in (b"x", b"y", b"z")] == [(1, "a"), (1, "a"), (2, "b")]
    assert in_progress.remove([b"x", b"q"], 1.0) == [b"x"]
    assert in_progress.end((1, "a")) == {b"y"}
    assert in_progress.end_attachment(2) == {b"z"}
    assert len(in_progress) == 0


def test_announcements_without_progress_expire() -> None:
    in_progress = BlocksInProgress(5.0)
    in_progress.add((1, "a"), [b"x", b"y"], 0.0)
    in_progress.remove([b"x"], 4.0)
    assert in_progress.expire(8.0) == set()
    assert in_progress.expire(9.5) == {b"y"}
