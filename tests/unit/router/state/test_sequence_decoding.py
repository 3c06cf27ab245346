"""Active-sequence events of other versions: known ones are decoded, others skipped."""

import msgspec
import pytest

from kvmesh.bus.messages import SeqBatch, SeqFree, SeqProgress, encode
from kvmesh.router.state.sequence_decoding import sequence_batch

BATCH = ["f", [["free", "1"], ["levitate", "2", 3], ["progress", "4", 5], ["free"]], "a new field"]


def test_events_of_unknown_kinds_are_skipped_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        batch = sequence_batch(msgspec.msgpack.encode(BATCH))
        assert batch.source == "f"
        assert batch.events == [SeqFree("1"), SeqProgress("4", 5)]
    assert len([r for r in caplog.records if "levitate" in r.message]) == 1


def test_known_events_are_decoded() -> None:
    batch = SeqBatch("f", [SeqFree("1"), SeqProgress("2", 3)])
    assert sequence_batch(encode(batch)) == batch


def test_a_message_that_is_not_a_batch_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        sequence_batch(b"\xc1")
