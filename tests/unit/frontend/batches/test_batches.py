"""The life of a batch, its requests, and the forms in which clients see it."""

import json
from typing import Any

import pytest

from kvmesh.frontend.apis.base import Usage
from kvmesh.frontend.batches import batch as states
from kvmesh.frontend.batches.batch import WINDOW_S, BatchCounts, LineFault, StoredBatch
from kvmesh.frontend.batches.forms import message_batch, openai_batch, rest_line
from kvmesh.frontend.batches.lines import MAX_LINES, WINDOW, check, spans
from kvmesh.frontend.batches.progress import BatchProgress
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.batches.pages import page

CHAT = "/v1/chat/completions"


def made(**changes: Any) -> StoredBatch:
    fields: dict[str, Any] = {
        "id": "batch_1", "form": "openai", "endpoint": CHAT, "tenant": "", "key": "",
        "headers": {}, "input_file": "file-1", "created": 100.0, "owner": "f", "output_ttl_s": 9.0,
    }  # fmt: skip
    return StoredBatch(**{**fields, **changes})


def line(name: str = "a", **changes: Any) -> bytes:
    entry = {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "m"}, **changes}
    return json.dumps(entry).encode() + b"\n"


def test_a_batch_runs_to_its_end() -> None:
    batch = states.began(made(), 2, ["m"], 101.0)
    assert (batch.status, batch.counts.total, batch.in_progress_at) == ("in_progress", 2, 101.0)
    assert states.rest(batch, 100.0 + WINDOW_S - 1) is None
    counts = batch.counts.plus("succeeded", Usage(prompt=5, cached=4, stored=0, output=3))
    counts = counts.plus("errored", None)
    batch = states.finalizing(made(counts=counts), 102.0)
    assert batch.status == "finalizing"
    batch = states.ended(batch, "file-o", "file-e", 103.0)
    assert (batch.status, batch.ended) == ("completed", True)
    shown = openai_batch(batch)
    assert shown["completed_at"] == 103
    assert shown["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert shown["usage"]["total_tokens"] == 8
    assert states.cancelled(batch, 104.0) is batch


def test_a_batch_that_another_frontend_goes_on_with_keeps_its_past() -> None:
    batch = states.began(made(), 2, ["m"], 101.0)
    again = states.began(batch, 2, [], 150.0)
    assert (again.in_progress_at, again.models) == (101.0, ["m"])


def test_a_cancelled_batch_ends_as_such_however_far_it_was() -> None:
    batch = states.cancelled(made(), 101.0)
    assert batch.status == "cancelling"
    assert states.cancelled(batch, 102.0) is batch
    assert states.rest(batch, 102.0) == "cancelled"
    for step in (states.began(batch, 1, [], 103.0), states.finalizing(batch, 103.0)):
        assert step.status == "cancelling"
    assert states.ended(batch, None, None, 104.0).status == "cancelled"


@pytest.mark.parametrize(
    ("batch", "status"),
    [
        (made(), "cancelling"),
        (states.rejected(made(), [LineFault("a", "b")], 103.0), "failed"),
        (states.ended(made(), None, None, 103.0), "cancelled"),
        (states.ended(made(counts=BatchCounts(expired=1)), None, None, 103.0), "cancelled"),
    ],
)
def test_a_batch_that_was_cancelled_while_it_ended_has_ended(
    batch: StoredBatch, status: str
) -> None:
    merged = states.merged(batch, states.cancelled(made(), 102.0))
    assert (merged.status, merged.cancelling_at) == (status, 102.0)


def test_a_batch_expires_after_its_window() -> None:
    batch = made()
    assert states.rest(batch, 100.0 + WINDOW_S) == "expired"
    counts = BatchCounts(total=1).plus("expired", None)
    ended = states.ended(made(counts=counts), None, "file-e", 100.0 + WINDOW_S)
    assert (ended.status, openai_batch(ended)["expired_at"]) == ("expired", int(100 + WINDOW_S))
    entry = json.loads(rest_line(batch, 0, "a", "expired"))
    assert entry["error"]["code"] == "batch_expired"


def test_a_batch_of_messages_counts_its_requests_at_the_end() -> None:
    counts = BatchCounts(total=3).plus("succeeded", None).plus("cancelled", None)
    running = message_batch(made(form="anthropic", counts=counts), "url")
    assert running["request_counts"]["processing"] == 3
    assert running["results_url"] is None
    ended = message_batch(
        states.ended(made(counts=counts.plus("errored", None)), None, None, 1.0), "u"
    )
    assert ended["request_counts"] == {
        "processing": 0, "succeeded": 1, "errored": 1, "canceled": 1, "expired": 0,
    }  # fmt: skip
    assert ended["results_url"] == "u"
    assert json.loads(rest_line(made(form="anthropic"), 0, "a", "cancelled")) == {
        "custom_id": "a", "result": {"type": "canceled"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"{\n", "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (line(""), "invalid_custom_id"),
        (line("a") * 2, "duplicate_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/completions"), "invalid_url"),
        (line(body=[]), "invalid_body"),
        (b"1\n" * (MAX_LINES + 1), "too_many_requests"),
        (b"1\n" * 50 * MAX_LINES, "too_many_requests"),
        (b"\n " * (10 << 20), "empty_file"),
    ],
)
def test_a_faulty_file_is_refused(data: bytes, code: str) -> None:
    found = spans(data)
    assert len(found) <= MAX_LINES + 1
    faults, _ = check(data, CHAT, found)
    assert [fault.code for fault in faults][-1] == code


def test_lines_end_anyhow() -> None:
    data = line("a") + b"\r\n" + line("b").replace(b"\n", b"\r\n") + line("c").rstrip()
    found = spans(data)
    assert check(data, CHAT, found) == ([], {"m"})
    assert len(found) == 3
    late = b"\n" * WINDOW + line("a")
    assert spans(late) == [slice(WINDOW, len(late) - 1)]


def test_requests_are_taken_once_and_again_only_after_a_failure() -> None:
    progress = BatchProgress(4, [1])
    assert [progress.take(0.0) for _ in range(4)] == [0, 2, 3, None]
    assert progress.end(0)
    assert not progress.end(0)
    progress.again(2, 0.0, 0.0)
    assert (progress.take(0.5), progress.due) == (None, 1.0)
    assert progress.take(1.0) == 2
    progress.again(2, 1.0, 30.0)
    assert progress.due == 31.0
    assert list(progress.rest) == [2, 3]
    assert progress.end(2)
    assert progress.end(3)
    assert progress.finished


def test_at_a_limit_of_the_key_no_request_is_taken() -> None:
    progress = BatchProgress(2, [])
    assert progress.take(0.0) == 0
    progress.again(0, 0.0, 2.0, pauses=True)
    assert (progress.take(1.9), progress.due) == (None, 2.0)
    assert [progress.take(2.0) for _ in range(3)] == [0, 1, None]


def test_pages_of_a_list() -> None:
    objects = [{"id": str(number)} for number in range(5)]
    for arguments, ids, more in (
        ((2,), "01", True),
        ((2, "1"), "23", True),
        ((2, "2"), "34", False),
        ((2, None, "4"), "23", True),
        ((2, None, "2"), "01", False),
        ((9, "4"), "", False),
    ):
        found = page(objects, *arguments)
        assert "".join(each["id"] for each in found["data"]) == ids, arguments
        assert found["has_more"] is more, arguments
    with pytest.raises(InvalidRequest):
        page(objects, 2, "9")
