"""A trace that leaves out, repeats or misspells something is read, with a word, or is one error."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions

ANOTHER = "if the unit is another, --time-unit names it, or convert the fields that name theirs"
START = 1_760_000_000_000
HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64}


def mooncake(number: int = 0, **changes: Any) -> dict[str, Any]:
    row = {
        "timestamp": number * 1000,
        "input_length": 1024,
        "output_length": 10,
        "hash_ids": [0, number + 1],
        **changes,
    }
    return {name: value for name, value in row.items() if value != "absent"}


def agentic(number: int, *dependencies: dict[str, Any]) -> dict[str, Any]:
    return {
        "request_id": f"r{number}",
        "play_id": "p",
        "session_id": "s",
        "hash_ids": [1, number + 2],
        "output_length": 5,
        "dependencies": list(dependencies),
    }


def after(number: int, delay_ms: float) -> dict[str, Any]:
    return {"request_id": f"r{number}", "delay_ms": delay_ms}


def tracelab(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "session_id": "s",
        "round_index": number,
        "input_tokens_total": 100 + number * 50,
        "prefix_tokens": number * 100,
        "newly_append_tokens": 50,
        "output_tokens": 5,
        "timing_events": [{"event_type": "user_message", "timestamp": START + number * 9000}],
        **changes,
    }


def bailian(number: int, chat: int, **changes: Any) -> dict[str, Any]:
    return {"chat_id": chat, "timestamp": number, "hash_ids": [1, 2], "output_length": 5, **changes}


def weka(**entry: Any) -> dict[str, Any]:
    first = {"t": 0, "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 1}
    return {"block_size": 64, "requests": [first, {**first, "t": 9, **entry}]}


def dynamo(**changes: Any) -> dict[str, Any]:
    request = {"input_tokens": 128, "output_tokens": 5, "request_received_ms": START}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": START,
        "request": request,
        **changes,
    }


def lines(*records: dict[str, Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read(folder: Path, content: bytes) -> tuple[Workload, list[str]]:
    file = folder / "trace"
    file.write_bytes(content)
    workload, repairs = load(str(file))
    return workload, repairs.notes


SESSIONS = b"session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
UNREAD = "fields that are not read: "
AS_LONG = "prompts without `input_length` are as long as their hash_ids"
AT_ONCE = "all requests start at once: the file has no times"
STATED = {
    "other names": (
        lines(*(mooncake(n, timestamp="absent", ts=n, model="m") for n in range(2))),
        [f"{UNREAD}ts, model", AT_ONCE],
    ),
    "a column with its unit": (
        b"time [s],input_length,output_length\n0,5,6\n1,5,6\n",
        [f"{UNREAD}time [s]", AT_ONCE],
    ),
    "no length": (lines(mooncake(input_length="absent"), mooncake(1)), [AS_LONG]),
    "no length, Bailian": (lines(bailian(0, 1), bailian(1, 2)), [AS_LONG]),
    "no length, agentic": (lines(HEADER, agentic(0)), [AS_LONG]),
    "some without a time": (
        lines(mooncake(), mooncake(1, timestamp=None)),
        ["1 request without a time: at the time of the first"],
    ),
    "some texts without a time": (
        lines({"text_input": "a", "timestamp": 5}, {"text_input": "b"}),
        ["1 request without a time: at the time of the first"],
    ),
    "no ids of Bailian": (
        lines(bailian(0, 1, hash_ids=[], input_length=9)),
        ["1 request without hash_ids: nothing shares them"],
    ),
    "no ids of Dynamo": (lines(dynamo()), ["1 request without hash_ids: nothing shares them"]),
    "no times of Bailian": (
        lines(bailian(0, 1, timestamp=None), bailian(0, 2, timestamp=None)),
        ["all sessions start at once: the file has no times"],
    ),
    "no times of TraceLab": (
        b"id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\na,0,0,9,9,0\nb,0,0,9,9,0\n",
        ["all sessions start at once: the file has no arrival times"],
    ),
    "seconds in place of milliseconds": (
        lines(*(mooncake(n, timestamp=n / 10) for n in range(20))),
        [f"20 requests in 0.0019 s: {ANOTHER}"],
    ),
    "one time": (
        lines(*(mooncake(n, timestamp=7) for n in range(20))),
        ["all 20 requests with a time have the same one"],
    ),
    "unknown parents": (
        lines(*(mooncake(n, session_id=f"{n}", parent_session_id="x") for n in range(2))),
        ["2 sessions of unknown parents: they are read as roots"],
    ),
    "a round that is missing": (
        lines(tracelab(0), tracelab(2), tracelab(3)),
        ["1 round missing between others of their session"],
    ),
    "a session of Weka without requests": (
        lines(weka(), {"block_size": 64, "requests": []}),
        ["left out 1 session without requests"],
    ),
    "parents in a circle": (
        lines(bailian(0, 1, parent_chat_id=2), bailian(0, 2, parent_chat_id=1)),
        ["chats whose parents lead back to them are sessions of their own"],
    ),
    "prefixes without a name": (
        lines({"shared_prefix_length": 50, "tail_input_length": 5, "output_length": 5}),
        ["rows without `shared_prefix_id` share one prefix"],
    ),
    "columns of TraceLab": (
        SESSIONS.replace(b"\n", b",model\n", 1) + b"a,0,0,0,9,9,0,x\n",
        ["fields that are not read: model"],
    ),
    "several arrivals of a session": (
        SESSIONS + b"a,0,0,0,9,9,0\na,5,1,9,9,9,0\n",
        ["1 session with several arrival times: the first counts"],
    ),
    "rounds twice": (
        lines(tracelab(0), tracelab(1), tracelab(1)),
        ["1 round with the index of another one of their session"],
    ),
    "a request twice": (
        lines(*[dynamo(request={"request_id": "a", "input_tokens": 9, "output_tokens": 9})] * 2),
        ["1 record with the request id of an earlier one"],
    ),
    "other events of Dynamo": (
        lines(dynamo(), dynamo(event_type="request_start")),
        ["1 record of other events is not read"],
    ),
    "more cached than the prompt": (
        lines(tracelab(0), tracelab(1, prefix_tokens=1000)),
        ["1 round with more cached tokens than prompt tokens"],
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_what_is_missing_is_stated(tmp_path: Path, name: str) -> None:
    content, expected = STATED[name]
    _, notes = read(tmp_path, content)
    assert [note for note in notes if note in expected] == expected


SECONDS = START / 1000
# Traces whose times are in another unit than their format's, and the start of what is said.
UNITS = {
    "Dynamo's times in seconds": (
        lines(
            *(
                dynamo(
                    event_time_unix_ms=SECONDS + 9 * n,
                    request={"input_tokens": 9, "request_received_ms": SECONDS + 9 * n},
                )
                for n in range(3)
            )
        ),
        "times are read as Unix times in s, by their size",
    ),
    "Dynamo's answers in seconds": (
        lines(
            *[dynamo(request={"input_tokens": 9, "output_tokens": 50, "total_time_ms": 2.0})] * 20
        ),
        "answers take 0.04 ms per token in the median",
    ),
    "delays in seconds": (
        lines(HEADER, agentic(0), *(agentic(n, after(n - 1, 2.5)) for n in range(1, 20))),
        "waits between turns are 2.5 ms in the median",
    ),
    "delays in microseconds": (
        lines(HEADER, agentic(0), *(agentic(n, after(n - 1, 2e6)) for n in range(1, 20))),
        "waits between turns are 2,000,000 ms in the median",
    ),
    "tools of TraceLab in seconds": (
        SESSIONS + b"".join(b"%d,0,0,0,9,9,1.5\n" % n for n in range(20)),
        "waits between turns are 1.5 ms in the median",
    ),
    "Weka in milliseconds": (
        lines({"block_size": 64, "requests": [{"t": 9000 * n, "in": 64} for n in range(20)]}),
        "20 requests in 171,000 s",
    ),
    "Bailian in milliseconds": (
        lines(*(bailian(1000 * n, n) for n in range(20))),
        "20 requests in 19,000 s",
    ),
    "Azure in milliseconds": (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + b"".join(b"%d000,5,6\n" % n for n in range(20)),
        "20 requests in 19,000 s",
    ),
}


@pytest.mark.parametrize("name", UNITS)
def test_times_in_another_unit_are_told(tmp_path: Path, name: str) -> None:
    content, expected = UNITS[name]
    _, notes = read(tmp_path, content)
    assert [note for note in notes if note.startswith(expected)]


def test_files_have_a_unit_of_unix_times_each(tmp_path: Path) -> None:
    def text(_: int, timestamp: float) -> dict[str, Any]:
        return {"prompt": "a", "timestamp": timestamp}

    def live(number: int, timestamp: float) -> dict[str, Any]:
        return dynamo(
            event_time_unix_ms=timestamp, request={"request_id": number, "input_tokens": 9}
        )

    for kind in (mooncake, text, live):
        (tmp_path / "a.jsonl").write_bytes(lines(kind(0, timestamp=SECONDS)))
        (tmp_path / "b.jsonl").write_bytes(lines(kind(1, timestamp=START + 2000)))
        workload, repairs = load(str(tmp_path))
        assert [round_.at_s for round_ in workload.rounds] == [0.0, 2.0]
        assert any(note.startswith("times are read as ") for note in repairs.notes)


DISPATCH = {"request_id": "r0", "trigger": "dispatch"}
REFUSED = {
    "a negative output of a text": (lines({"prompt": "a", "max_tokens": -1}), "got 1 and -1"),
    "too many tokens of a text": (lines({"prompt": "a", "max_tokens": 1e15}), "got 1 and 1000"),
    "a negative wait of a text": (
        lines(
            {"text_input": "a", "session_id": 1}, {"text_input": "b", "session_id": 1, "delay": -9}
        ),
        "a wait between 0 and 1e+11 ms expected, got -9",
    ),
    "an endless wait of Weka": (lines(weka(think_time=1e300)), "Expected `float` <= 100000000.0"),
    "a negative time of Weka": (lines(weka(api_time=-5)), "Expected `float` >= 0.0"),
    "too many ids of Weka": (
        lines({**weka(hash_ids=[1]), "block_size": 16}),
        "2 hash_ids for 130 tokens, which are 9 blocks of 16",
    ),
    "a negative time of Dynamo": (
        lines(dynamo(request={"input_tokens": 9, "total_time_ms": -5})),
        "Expected `float` >= 0.0 - at `request.total_time_ms`",
    ),
    "a turn that is none": (
        lines({"turns": [None, {"text": "a"}]}),
        "Expected `object` or `str`, got `NoneType` - in turns",
    ),
    "a step that is none": (
        lines({"trajectory": [{"observation": "a", "action": "b"}, 5]}),
        "Expected `object` or `str`, got `int` - in steps",
    ),
    "a negative token id": (lines({"prompt": [1, -1]}), "a token id is out of range - at `prompt`"),
    "a cycle of dispatches": (
        lines(HEADER, agentic(0, {**DISPATCH, "request_id": "r1"}), agentic(1, DISPATCH)),
        "cycle in wait_for through 'r0'",
    ),
    "a cycle of parents": (
        lines(
            mooncake(0, session_id="a", parent_session_id="b"),
            mooncake(1, session_id="b", parent_session_id="a"),
        ),
        "cycle of parent sessions through 'a'; with --repair: dropped the parent",
    ),
    "a parent of its own": (
        lines(mooncake(0, session_id="a", parent_session_id="a")),
        "cycle of parent sessions through 'a'",
    ),
    "a chat twice": (lines(bailian(0, 7), bailian(1, 7)), "duplicate chat id '7'"),
    "a record without its request": (
        lines(dynamo(), dynamo(request=None)),
        "Object missing required field `request`",
    ),
    "a quote without its end": (
        b'prompt,output_tokens_count\n"a\nb,5\nd,6\n',
        "unexpected end of data",
    ),
    "a column twice": (
        b"timestamp,input_length,input_length,output_length\n0,5,7,6\n",
        "several columns with the name input_length",
    ),
    "a pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 9\n",
        "this is a pointer of Git LFS, which is not read: fetch the file (`git lfs pull`)",
    ),
    "a tar archive": (b"a".ljust(257, b"\0") + b"ustar\0", "this is a tar archive"),
    "Feather": (b"FEA1" + bytes(9), "this is Feather, which is not read: write it as JSON lines"),
    "a part of an archive": (
        gzip.compress(lines(mooncake()))[:-9],
        "fetch it again, or unpack what is left",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_error(tmp_path: Path, name: str) -> None:
    content, reason = REFUSED[name]
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, content)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_trace_of_which_no_row_is_left_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(lines({"prompt": "a", "max_tokens": -1}))
    with pytest.raises(WorkloadError, match="lengths between 0 and 100,000,000 tokens expected"):
        load(str(file), repair=True)


def test_files_that_count_their_chats_anew_are_not_one_workload(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(lines(bailian(0, 0), bailian(1, 1)))
    with pytest.raises(WorkloadError, match=r"duplicate chat id '0'.*read one at a time"):
        load(str(tmp_path))


def test_a_parent_may_begin_after_its_child(tmp_path: Path) -> None:
    rows = [
        mooncake(0, session_id="grandchild", parent_session_id="child"),
        mooncake(1, session_id="child", parent_session_id="parent"),
        mooncake(2, session_id="parent"),
    ]
    workload, notes = read(tmp_path, lines(*rows))
    parents = {
        session.name: None if session.parent is None else workload.sessions[session.parent].name
        for session in workload.sessions
    }
    assert parents == {"parent": None, "child": "parent", "grandchild": "child"}
    assert notes == []


def test_a_long_line_of_parents_is_read_at_once(tmp_path: Path) -> None:
    rows = [mooncake(n, session_id=n, parent_session_id=n + 1) for n in range(20_000)]
    workload, _ = read(tmp_path, lines(*rows, mooncake(20_000, session_id=20_000)))
    assert sum(session.parent is not None for session in workload.sessions) == 20_000


def test_an_empty_name_is_absent(tmp_path: Path) -> None:
    rows = [mooncake(n, session_id="", request_id="", parent_session_id="") for n in range(3)]
    workload, _ = read(tmp_path, lines(*rows))
    assert len(workload.sessions) == 3


def test_an_instruction_is_read_with_what_it_is_about(tmp_path: Path) -> None:
    rows = (
        {"instruction": "Translate.", "input": about, "output": "x"} for about in ("", "a" * 400)
    )
    workload, _ = read(tmp_path, lines(*rows))
    assert [round_.input_tokens for round_ in workload.rounds] == [3, 103]


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(mooncake()))
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(9))
    (tmp_path / "c.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(9))
    (tmp_path / "README.md").write_text("# A trace")
    _, repairs = load(str(tmp_path))
    assert repairs.notes == ["left out 2 files that are no traces: b.parquet, c.jsonl.zst"]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(WorkloadError, match="this is Parquet, which is not read: write it as"):
        load(str(tmp_path))


def test_a_file_is_not_read_twice(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(mooncake()))
    for sources in ([file, file], [tmp_path, file], [tmp_path, tmp_path]):
        with pytest.raises(WorkloadError, match=r"a\.jsonl: this file is named twice"):
            load([str(each) for each in sources])


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WorkloadError, match="a pipe or device, which is read once: name a file"):
        load(str(tmp_path / "pipe"))


OPTIONS = {"turns": "delta", "time_unit": "s", "trace_block_size": 32}
# The options that a format has no use for.
USELESS: dict[str, tuple[bytes, set[str]]] = {
    "Mooncake": (lines(mooncake(input_length=64), mooncake(1, input_length=64)), {"turns"}),
    "Mooncake with sizes": (lines(mooncake(block_size=512)), {"turns", "trace_block_size"}),
    "Mooncake with dates": (
        lines(mooncake(timestamp="2026-05-01", block_size=512)),
        {*OPTIONS},
    ),
    "Mooncake without times": (
        lines(mooncake(timestamp="absent", hash_ids="absent")),
        {*OPTIONS},
    ),
    "agentic Mooncake": (lines(HEADER, agentic(0)), {*OPTIONS}),
    "Dynamo": (lines(dynamo()), {*OPTIONS}),
    "Weka": (lines(weka()), {"turns", "trace_block_size"}),
    "the corpus": (
        lines(tracelab(0, timing_events=[{"event_type": "output", "timestamp": "2026-05-01"}])),
        {*OPTIONS},
    ),
    "sessions": (SESSIONS + b"a,7,0,0,9,9,0\n", {"turns", "trace_block_size"}),
    "Bailian": (lines(bailian(0, 1)), {"turns"}),
    "Azure": (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,6\n",
        {*OPTIONS},
    ),
    "texts": (lines({"prompt": "a"}), {*OPTIONS}),
    "texts with times": (lines({"prompt": "a", "timestamp": 5}), {"turns", "trace_block_size"}),
}


@pytest.mark.parametrize("name", USELESS)
def test_an_option_without_effect_is_stated(tmp_path: Path, name: str) -> None:
    content, useless = USELESS[name]
    file = tmp_path / "trace"
    file.write_bytes(content)
    _, repairs = load(str(file), options=ReadOptions(**OPTIONS))  # type: ignore[arg-type]
    told = {note.split(" ")[0] for note in repairs.notes if " changes nothing: " in note}
    assert told == {f"--{each.replace('_', '-')}" for each in useless}


def test_options_are_those_of_profiles_too() -> None:
    _, repairs = load("demo", options=ReadOptions(time_unit="s"))
    assert [note.split(":")[0] for note in repairs.notes] == ["--time-unit changes nothing"]
    assert len(load("demo", options=ReadOptions(end_s=1.0))[0]) < len(load("demo")[0])


def test_a_unit_counts_for_delays_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    turns = ({"text_input": "a" * 99 * n, "session_id": 1, "delay": 5} for n in (1, 2))
    file.write_bytes(lines(*turns))
    workload, _ = load(str(file), options=ReadOptions(time_unit="s"))
    assert workload.rounds[1].at_s == 5.0


def test_links_are_followed_once_and_dead_ones_are_named(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "traces", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "one.JSONL").write_bytes(lines(mooncake(0)))
    (folder / "day").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (folder / "two.jsonl").write_bytes(lines(mooncake(1)))
    (folder / "last.jsonl").symlink_to("two.jsonl")
    (folder / "lost.jsonl").symlink_to("nowhere")
    (folder / "part-0001").write_bytes(lines(mooncake(2)))
    os.mkfifo(folder / "pipe.jsonl")
    workload, repairs = load(str(folder))
    assert len(workload) == 2
    assert repairs.notes == [
        "left out 4 files that are no traces: lost.jsonl (a dead link), part-0001 (not a name of "
        "traces), pipe.jsonl (a pipe or device), two.jsonl (a link to last.jsonl)"
    ]


def test_a_session_may_go_on_in_another_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(SESSIONS + b"a,0,1,18,9,9,0\n")
    (tmp_path / "b.csv").write_bytes(SESSIONS + b"a,0,0,0,9,9,0\n")
    workload, repairs = load(str(tmp_path))
    assert [round_.input_tokens for round_ in workload.rounds] == [9, 27]
    (tmp_path / "c.csv").write_bytes(SESSIONS + b"a,0,0,0,9,9,0\n")
    workload, repairs = load(str(tmp_path))
    assert len(workload.sessions) == 2
    assert "1 session with the name of one in another file" in repairs.notes


@pytest.mark.parametrize(
    ("source", "reason"),
    [("", "no such file"), ("-", "write the input to a file"), ("s3://a/b", "a URL: fetch")],
)
def test_what_is_no_file_is_refused(source: str, reason: str) -> None:
    with pytest.raises(WorkloadError, match=reason):
        load(source)


def test_a_text_says_more_than_its_length(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 400, "prompt_tokens_count": 90, "output_tokens_count": 9}] * 2
    table = ["prompt,prompt_tokens_count,output_tokens_count"]
    table += [",".join(map(str, row.values())) for row in rows]
    for content in (lines(*rows), "\n".join(table).encode()):
        workload, _ = read(tmp_path, content)
        first, second = workload.rounds
        assert first.branch == second.branch
