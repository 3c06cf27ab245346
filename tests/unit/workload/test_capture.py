"""Captures: decisions and outcomes become rounds with their waits, sharing and lengths."""

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from kvmesh.bus.messages import Candidate, Decision, Hints, Outcome, encode
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.capture import CaptureEnd, CaptureError, Recorder, assemble, fitting_block_size
from kvmesh.workload.formats.registry import load, save
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.writing.targets import Target

BLOCK = 16


def decided(
    request: str, arrival: float, blocks: Iterable[int], tokens: int, hints: Hints | None = None
) -> Decision:
    chosen = Candidate(
        instance="w-1", worker="w", rank=0, overlap=[], prefill=0, decode=0, requests=0, cost=0
    )
    return Decision(
        request=request,
        model="m",
        time=arrival + 0.25,
        router="r",
        policy="kv",
        chosen=chosen,
        candidates=[],
        tokens=tokens,
        sequence_hashes=np.fromiter(blocks, np.uint64).tobytes(),
        max_tokens=10,
        hints=hints or Hints(),
        wait_s=0.25,
    )


def ended(request: str, time: float, output: int = 10, finish: str = "length") -> Outcome:
    return Outcome(
        request=request,
        instance="w-1",
        time=time,
        cached_tokens=0,
        output_tokens=output,
        ttft_s=0.1,
        total_s=1.0,
        finish=finish,
    )


def recorded(*events: Decision | Outcome, model: str | None = None) -> Recorder:
    recorder = Recorder(model)
    for event in events:
        recorder.add(event)
    return recorder


SESSION = Hints(session="s", priority=3)


def test_times_count_from_the_first_arrival() -> None:
    recorder = recorded(
        decided("b", 1005.0, range(100, 104), 70),
        decided("a", 1000.0, range(4), 70),
        ended("b", 1007.0),
        ended("a", 1006.0),
    )
    workload = assemble(recorder.rounds)
    assert [round_.at_s for round_ in workload.rounds] == [0.0, 5.0]
    assert [s.name for s in workload.sessions] == ["a", "b"]


def test_a_round_after_the_end_of_the_previous_one_waits_for_it() -> None:
    recorder = recorded(
        decided("a", 1000.0, range(4), 64, SESSION),
        ended("a", 1002.0, output=20),
        decided("b", 1003.5, range(8), 130, SESSION),
        ended("b", 1004.0),
        decided("c", 1003.9, range(8), 129, SESSION),
        ended("c", 1009.0),
    )
    first, second, third = assemble(recorder.rounds).rounds
    assert second.after == (0,)
    assert second.at_s == pytest.approx(1.5)
    assert third.after == ()
    assert third.at_s == pytest.approx(3.9)
    assert {r.session for r in (first, second, third)} == {0}
    assert first.priority == 3


def test_shared_hashes_are_shared_tokens_and_prompts_contain_outputs() -> None:
    recorder = recorded(
        decided("a", 0.0, range(4), 70, SESSION),
        ended("a", 1.0, output=30),
        decided("b", 2.0, range(8), 130, SESSION),
        ended("b", 3.0),
        decided("c", 4.0, [0, 1, 50], 50),
        ended("c", 5.0),
    )
    workload = assemble(recorder.rounds)
    one, two, three = workload.rounds
    assert workload.block_size == BLOCK
    assert workload.tree.shared(one.branch, three.branch, 48) == 32
    assert workload.tree.shared(one.output_branch, two.branch, 100) == 100


def test_children_know_their_parents() -> None:
    recorder = recorded(
        decided("a", 0.0, range(2), 33, SESSION),
        ended("a", 1.0),
        decided("b", 0.5, [9, 10], 33, Hints(session="child", parent_session="s")),
        ended("b", 1.0),
    )
    assert assemble(recorder.rounds).sessions[1].parent == 0


@pytest.mark.parametrize("root", [None, "child"])
def test_a_parent_may_begin_after_its_child(root: str | None) -> None:
    """Or be the child of its own child, as clients say."""
    recorder = recorded(
        decided("a", 0.0, [9, 10], 33, Hints(session="child", parent_session="s")),
        decided("b", 0.5, [1, 2], 33, Hints(session="s", parent_session=root)),
        ended("a", 1.0),
        ended("b", 1.5),
    )
    sessions = assemble(recorder.rounds).sessions
    assert [(each.name, each.parent) for each in sessions] == [("s", None), ("child", 0)]


def test_sessions_end_as_they_did() -> None:
    last = Hints(session="s", session_final=True)
    recorder = recorded(
        decided("a", 0.0, range(2), 33, SESSION),
        ended("a", 1.0),
        decided("b", 2.0, range(2), 33, last),
        ended("b", 3.0),
    )
    assert [session.ends for session in assemble(recorder.rounds).sessions] == [True]


def test_unfinished_requests_are_skipped_and_counted() -> None:
    recorder = recorded(decided("a", 0, range(2), 40), ended("a", 1), decided("b", 0, [], 5))
    assert len(recorder.rounds) == 1
    assert recorder.unfinished == 1


def test_other_models_are_skipped() -> None:
    recorder = recorded(decided("a", 0, range(2), 40), ended("a", 1), model="other")
    assert recorder.rounds == []


def test_a_cancelled_request_is_aborted_again() -> None:
    recorder = recorded(decided("a", 0, range(2), 40), ended("a", 1, 7, "cancelled"))
    assert assemble(recorder.rounds).rounds[0].abort_after == 7


@pytest.mark.parametrize("size", [1, 16, 48, 64])
def test_the_block_size_follows_from_the_counts(size: int) -> None:
    prompts = [7, 63, 64, 129, 1000, 4097]
    events = [decided(str(n), 0, range(n // size), n) for n in prompts]
    recorder = recorded(*events, *[ended(str(n), 1) for n in prompts])
    assert fitting_block_size(recorder.rounds) == size


def test_mixed_block_sizes_are_rejected() -> None:
    recorder = recorded(
        *(decided(f"a{size}", 0, range(1000 // size), 1000) for size in (16, 64)),
        *(ended(f"a{size}", 1) for size in (16, 64)),
    )
    with pytest.raises(CaptureError, match="several block sizes"):
        assemble(recorder.rounds)


def test_an_empty_capture_is_an_error() -> None:
    with pytest.raises(CaptureError, match="no finished requests"):
        assemble([])


def stored(data: bytes, time: float) -> StreamMessage:
    return StreamMessage("s", data, 1, 0, None, time)


def test_a_capture_ends_at_a_time_or_a_bound() -> None:
    placed, end = encode(decided("a", 1.0, [1], 16)), encode(ended("a", 2.0))
    by_time = CaptureEnd(until=5.0)
    assert not by_time.reached(stored(placed, 4.0))
    assert by_time.reached(stored(end, 6.0))
    assert not by_time.cut
    by_count = CaptureEnd(most_requests=1)
    assert [by_count.reached(stored(data, 1.0)) for data in (placed, end, placed)] == [
        False, False, True,
    ]  # fmt: skip
    assert by_count.cut
    by_size = CaptureEnd(most_bytes=1)
    assert [by_size.reached(stored(placed, 1.0)) for _ in range(2)] == [False, True]
    assert by_size.cut


def test_messages_of_another_version_are_counted() -> None:
    recorder = Recorder()
    recorder.read(encode(decided("a", 1.0, [1], 16)))
    recorder.check()
    recorder.read(b"?")
    with pytest.raises(CaptureError, match="cannot decode 1"):
        recorder.check()


@pytest.mark.parametrize(
    ("waits_for", "wait", "wait_class"),
    [
        ([], "pause", ""),
        (["end"], "pause", ""),
        (["human"], "human", ""),
        (["tool"], "tool", ""),
        (["tool", "Bash", "ls"], "Bash", "ls"),
    ],
)
def test_a_round_is_named_by_what_its_session_waited_for(
    waits_for: list[str], wait: str, wait_class: str
) -> None:
    first = msgspec.structs.replace(ended("a", 1002.0), agent="coder", waits_for=waits_for)
    recorder = recorded(
        decided("a", 1000.0, range(4), 64, SESSION),
        first,
        decided("b", 1003.5, range(8), 130, SESSION),
        ended("b", 1004.0),
    )
    workload = assemble(recorder.rounds)
    assert workload.sessions[0].kind == "coder"
    after = workload.rounds[1]
    assert (after.wait, after.wait_class) == (wait, wait_class)
    assert after.waited_for() == ([] if wait == "pause" else waits_for)


def captured_day() -> Workload:
    """A session whose prompts grow by the answers, a compaction, its child, and two strangers."""
    child = Hints(session="s/x", parent_session="s")
    return assemble(
        recorded(
            decided("a", 1000.0, range(8), 130, SESSION),
            ended("a", 1001.0),
            decided("x", 1001.5, [0, 1, 2, 3, 50, 51], 100, child),
            ended("x", 1002.0),
            decided("b", 1003.0, range(10), 166, SESSION),
            ended("b", 1004.0),
            decided("c", 1010.0, [0, 1, 60, 61], 66, SESSION),
            ended("c", 1011.0),
            decided("one", 1012.0, [0, 1, 2, 70], 70),
            ended("one", 1013.0),
            decided("two", 1012.5, [0, 1, 2, 70, 71], 80),
            ended("two", 1014.0),
        ).rounds
    )


@pytest.mark.parametrize("target", [None, *get_args(Target)])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_what_was_captured_is_written_and_read_again(
    tmp_path: Path, target: Target | None, suffix: str
) -> None:
    if target is not None and suffix == ".json":
        pytest.skip("other tools read JSON lines")
    day, file = captured_day(), tmp_path / f"day{suffix}"
    save(day, file, None, target)
    seconds = target in ("guidellm", "vllm")
    again, repairs = load(str(file), options=ReadOptions(time_unit="s" if seconds else None))
    assert repairs.counts() == {}
    lengths = [(r.input_tokens, r.output_tokens) for r in day.rounds]
    assert sorted((r.input_tokens, r.output_tokens) for r in again.rounds) == sorted(lengths)
    assert sum(ideal_hits(again, BLOCK)) == sum(ideal_hits(day, BLOCK))
    if target is None or target == "dynamo":
        assert [(r.after, round(r.at_s, 3)) for r in again.rounds] == [
            (r.after, round(r.at_s, 3)) for r in day.rounds
        ]
        assert [s.parent for s in again.sessions] == [s.parent for s in day.sessions]
