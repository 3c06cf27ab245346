"""Mooncake traces: reading, rejections with line numbers, repairs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvmesh.workload.errors import Repairs, TraceError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload

Lines = list[dict[str, Any] | str]


def trace(folder: Path, lines: Lines) -> Path:
    file = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def read(file: Path, repair: bool = False) -> tuple[Workload, Repairs]:
    return load(str(file), repair)


def row(time: float | None, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    fields = {"input_length": tokens, "output_length": 5, "hash_ids": ids, **more}
    return fields if time is None else {"timestamp": time, **fields}


def shared(workload: Workload, one: int, other: int) -> int:
    left, right = workload.rounds[one], workload.rounds[other]
    tokens = min(left.input_tokens, right.input_tokens)
    return workload.tree.shared(left.branch, right.branch, tokens)


def test_shared_ids_are_shared_tokens(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        [
            row(0, 1400, [0, 1, 2]),
            row(10, 1500, [0, 1, 3]),
            row(20, 2000, [0, 1, 2, 4]),
            row(30, 100, [9]),
        ],
    )
    workload, repairs = read(file)
    assert repairs.counts() == {}
    assert [round_.at_s for round_ in workload.rounds] == [0, 0.01, 0.02, 0.03]
    assert shared(workload, 0, 1) == 1024
    assert shared(workload, 0, 2) == 1400
    assert shared(workload, 1, 2) == 1024
    assert shared(workload, 0, 3) == 0


def test_an_output_is_not_in_later_prompts(tmp_path: Path) -> None:
    workload, _ = read(trace(tmp_path, [row(0, 600, [0, 1]), row(1, 1500, [0, 1, 2])]))
    first = workload.rounds[0]
    assert workload.tree.shared(first.output_branch, workload.rounds[1].branch, 1500) == 600


def test_turns_of_a_session_follow_each_other(tmp_path: Path) -> None:
    lines: Lines = [
        row(0, 600, [0, 1], session_id="a"),
        row(None, 700, [0, 1], session_id="a", delay=250),
        row(40, 100, [7], session_id="b", parent_session_id="a"),
    ]
    workload, _ = read(trace(tmp_path, lines))
    assert [list(members) for members in workload.by_session()] == [[0, 1], [2]]
    assert workload.rounds[1].after == (0,)
    assert workload.rounds[1].at_s == 0.25
    assert workload.sessions[1].parent == 0


def test_agentic_rows_wait_for_rows_in_any_order(tmp_path: Path) -> None:
    lines: Lines = [
        row(None, 10, [2], request_id="c", wait_for=["a", "b"], delay=100, tool_wait_ms=400),
        row(0, 10, [0], request_id="a"),
        row(5, 10, [1], request_id="b"),
    ]
    workload, _ = read(trace(tmp_path, lines))
    last = workload.rounds[2]
    assert last.after == (0, 1)
    assert last.at_s == 0.5


def test_other_spellings_of_fields_are_accepted(tmp_path: Path) -> None:
    lines: Lines = [{"created_time": 3, "input_tokens": 9, "output_tokens": 2, "hash_ids": [1]}]
    workload, _ = read(trace(tmp_path, lines))
    assert workload.rounds[0].input_tokens == 9
    assert workload.rounds[0].at_s == 0.0


GOOD = row(0, 600, [0, 1])
BAD: list[tuple[dict[str, Any] | str, str, str]] = [
    ("{not json", "malformed", "dropped the line"),
    ("[1, 2]", "Expected `object`", "dropped the line"),
    ({"timestamp": 1, "output_length": 5}, "missing required field", "dropped the line"),
    (row(1, -5, []), "`input_length`", "dropped the line"),
    (row(1, 5, [0], output_length=-1), "`output_length`", "dropped the line"),
    (row(1.7e12, 5, [0]), "`float` <= 1.* - at `timestamp`", "dropped the line"),
    (row(1, 5, [0], output_length=10**12), "`output_length`", "dropped the line"),
    (row(1, 5, [0], priority=10**30), "`priority`", "dropped the line"),
    (row(1, 1200, [0]), "1 hash_ids for 1200 tokens", "shortened the prompt to its hash_ids"),
    (row(1, 600, [0, 1, 2]), "3 hash_ids for 600 tokens", "dropped surplus hash_ids"),
    (row(1, 600, [1, 0]), "hash id 1 follows another block", "renamed"),
    (row(1, 5, [0], wait_for=["nobody"]), "unknown request 'nobody'", "dropped the wait"),
    (
        row(None, 5, [0], request_id="me", wait_for=["me"]),
        "cycle in wait_for through 'me'",
        "dropped the wait",
    ),
]


@pytest.mark.parametrize(("line", "reason", "repair"), BAD)
def test_an_invalid_line_is_rejected_by_number_or_repaired(
    tmp_path: Path, line: dict[str, Any] | str, reason: str, repair: str
) -> None:
    file = trace(tmp_path, [GOOD, line, row(2, 100, [0])])
    with pytest.raises(TraceError, match=rf"{file}:2: .*{reason}"):
        read(file)
    workload, repairs = read(file, repair=True)
    assert repair in repairs.counts()
    assert len(workload) == (2 if repair == "dropped the line" else 3)


def test_decreasing_times_are_rejected_or_sorted(tmp_path: Path) -> None:
    file = trace(tmp_path, [row(50, 100, [0]), row(20, 100, [1])])
    with pytest.raises(TraceError, match=r":2: timestamp 20 ms is before 50 ms"):
        read(file)
    workload, _ = read(file, repair=True)
    assert [round_.at_s for round_ in workload.rounds] == [0.0, 0.03]


def test_sorting_keeps_turns_behind_their_predecessors(tmp_path: Path) -> None:
    lines: Lines = [
        row(500, 100, [0], session_id="late", request_id="same"),
        row(None, 100, [0], session_id="late", delay=10),
        row(20, 100, [1], session_id="early", request_id="same"),
        row(None, 100, [1], session_id="early", delay=20),
        row(None, 100, [0], session_id="late", delay=30),
    ]
    file = trace(tmp_path, lines)
    with pytest.raises(TraceError, match=r":3: duplicate request id 'same'"):
        read(file)
    workload, repairs = read(file, repair=True)
    assert repairs.counts() == {"dropped the id": 1, "sorted by time": 1}
    assert [round_.at_s for round_ in workload.rounds] == [0.0, 0.02, 0.48, 0.01, 0.03]
    assert [round_.after for round_ in workload.rounds] == [(), (0,), (), (2,), (3,)]


def test_a_cycle_of_three_is_cut_once(tmp_path: Path) -> None:
    lines: Lines = [
        row(None, 5, [i], request_id=str(i), wait_for=[str((i + 1) % 3)]) for i in range(3)
    ]
    workload, repairs = read(trace(tmp_path, lines), repair=True)
    assert repairs.counts() == {"dropped the wait": 1}
    assert sum(bool(round_.after) for round_ in workload.rounds) == 2


def test_request_ids_are_unique(tmp_path: Path) -> None:
    lines: Lines = [row(i, 5, [i], request_id="same") for i in range(2)]
    lines.append(row(None, 5, [5], wait_for=["same"]))
    file = trace(tmp_path, lines)
    with pytest.raises(TraceError, match=r":2: duplicate request id 'same'"):
        read(file)
    workload, _ = read(file, repair=True)
    assert workload.rounds[2].after == (0,)


def test_a_long_chain_written_backwards_is_read_at_once(tmp_path: Path) -> None:
    count = 3000
    lines: Lines = [
        row(None, 5, [i], request_id=str(i), wait_for=[str(i - 1)] if i else [])
        for i in reversed(range(count))
    ]
    workload, _ = read(trace(tmp_path, lines))
    assert [round_.after for round_ in workload.rounds[1:]] == [(i,) for i in range(count - 1)]


def test_defects_of_one_cause_are_counted_not_listed(tmp_path: Path) -> None:
    lines: Lines = [GOOD, *["x"] * 25, row(1, -5, []), row(1, -7, [])]
    with pytest.raises(TraceError, match="and 24 more lines like it") as caught:
        read(trace(tmp_path, lines))
    assert len(caught.value.problems) == 27
    assert len(str(caught.value).splitlines()) == 2


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        read(trace(tmp_path, [""]))


def test_the_public_conversation_trace() -> None:
    path = os.environ.get("KVMESH_CONVERSATION_TRACE")
    if not path:
        pytest.skip("set KVMESH_CONVERSATION_TRACE to the public Mooncake conversation trace")
    workload, _ = read(Path(path))
    assert len(workload) == 12_031
    assert sum(round_.input_tokens for round_ in workload.rounds) // len(workload) == 12_035
