"""One trace as other programs write it: packed, quoted, in other units, beside other files."""

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvmesh.workload.errors import TraceError, WorkloadError
from kvmesh.workload.formats.detection import FormatError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions

ROWS: list[dict[str, Any]] = [
    {"timestamp": n * 100, "input_length": 1025 + n, "output_length": 10,
     "hash_ids": [1, 2 + n % 3, 100 + n]}
    for n in range(6)
]  # fmt: skip
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS)
COLUMNS = ",".join(ROWS[0])
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,374,44\n"


def rows(**changed: Any) -> str:
    """The rows, with fields changed by functions of their values."""
    return "".join(
        json.dumps({k: changed[k](v) if k in changed else v for k, v in row.items()}) + "\n"
        for row in ROWS
    )


def shape(workload: Workload) -> list[tuple[float, int, int]]:
    """Time, length and shared tokens of each prompt with the first one."""
    first = workload.rounds[0].branch
    return [
        (round(r.at_s, 6), r.input_tokens, workload.tree.shared(first, r.branch, 1 << 20))
        for r in workload.rounds[1:]
    ]


@pytest.fixture
def plain(tmp_path: Path) -> list[tuple[float, int, int]]:
    file = tmp_path / "plain.jsonl"
    file.write_text(TEXT)
    return shape(load(str(file))[0])


ISO = "2024-05-01T10:00:{:06.3f}+02:00"
SPELLINGS: dict[str, bytes] = {
    "windows": TEXT.replace("\n", "\r\n").encode(),
    "mark": TEXT.encode("utf-8-sig"),
    "twice packed": gzip.compress(gzip.compress(TEXT.encode())),
    "an array": json.dumps(ROWS, indent=2).encode(),
    "in a document": json.dumps({"version": 1, "data": ROWS}).encode(),
    "floats": rows(input_length=float, hash_ids=lambda ids: [float(each) for each in ids]).encode(),
    "texts": rows(timestamp=str, hash_ids=lambda ids: [str(each) for each in ids]).encode(),
    "hashes": rows(hash_ids=lambda ids: [f"{each:x}-hash" for each in ids]).encode(),
    "digests": rows(hash_ids=lambda ids: [f"{each}e400" for each in ids]).encode(),
    "wide": rows(hash_ids=lambda ids: [each + (1 << 70) for each in ids]).encode(),
    "before 0": rows(timestamp=lambda time: time - 5000).encode(),
    "dates": rows(timestamp=lambda time: ISO.format(time / 1000)).encode(),
    "seconds": rows(timestamp=lambda time: 1714557600 + time / 1e3).encode(),
    "micros": rows(timestamp=lambda time: 1714557600_000_000 + time * 1000).encode(),
    "nanos": rows(timestamp=lambda time: 1714557600_000_000_000 + time * 10**6).encode(),
    "table": "\n".join(
        [COLUMNS, *(",".join(f'"{value}"' for value in row.values()) for row in ROWS)]
    ).encode(),
    "names in capitals": "\n".join(
        [COLUMNS.title(), *(",".join(f'"{value}"' for value in row.values()) for row in ROWS)]
    ).encode(),
    "hexadecimal": rows(hash_ids=lambda ids: [hex(ids[0]), *ids[1:]]).encode(),
    "a table below blank lines, with blanks": "\n\n".join(
        ["", ", ".join(ROWS[0]), *(", ".join(f'"{v}"' for v in row.values()) for row in ROWS)]
    ).encode(),
    "tabs": "\n".join(
        ["\t".join(ROWS[0]), *("\t".join(map(str, row.values())) for row in ROWS)]
    ).encode(),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_changes_nothing(
    tmp_path: Path, plain: list[tuple[float, int, int]], name: str
) -> None:
    file = tmp_path / "trace"
    file.write_bytes(SPELLINGS[name])
    workload, repairs = load(str(file))
    assert shape(workload) == plain
    unix = name in ("seconds", "micros", "nanos")
    assert [note.startswith("times are read as Unix times in") for note in repairs.notes] == (
        [True] if unix else []
    )


def test_a_unit_that_is_named_is_not_guessed(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(SPELLINGS["seconds"])
    workload, repairs = load(str(file), options=ReadOptions(time_unit="ms"))
    assert workload.rounds[1].at_s == pytest.approx(0.0001)
    assert repairs.notes == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no requests in this file"),
        (b"[]", "no requests in this file"),
        (b"\n\n", "no requests in this file"),
        (AZURE.splitlines()[0].encode(), "no requests in this file"),
        (TEXT.encode("utf-16"), "this is text in UTF-16 or UTF-32, which is not read: write it as"),
        (b"\x00\x01\x02", "this is no text"),
        (b"\x93\x81\n", "this is no text"),
        (b'{"a": 1, "b": 2}', r"no known format has its records \(a, b\)"),
        (
            json.dumps({k: {"0": 1} for k in ROWS[0]}).encode(),
            r"a table by columns, .*orient='records'",
        ),
        (json.dumps({k: [row[k] for row in ROWS] for k in ROWS[0]}).encode(), "by columns"),
        (b'{"benchmarks": [{"requests": {}}]}', "GuideLLM's report of a run"),
        (b'{"ttfts": [1], "itls": [[1]], "input_lens": [3]}', "the result of `vllm bench`"),
        (COLUMNS.encode() + b'\n0,9000,1,"[1 2 3 ... 17 18]"\n', r"an abridged list \(`...`\)"),
        (rows(hash_ids=lambda ids: [9.3e18, *ids[1:]]).encode(), "without its last digits"),
        (rows(hash_ids=lambda ids: [1e17 + each for each in ids]).encode(), "last digits"),
        ((TEXT.replace("{", '{"session_id": 1e18, ')).encode(), "without its last digits"),
        (b"input_length,output_length\n5,7\n6", ":3: a line that is cut off"),
        (json.dumps(ROWS[0], indent=1).encode() * 2, r"`jq -c .` makes lines"),
        (b'{"metadata": {}, "metrics": {"ttft": 1}}', "AIPerf's records of a run"),
        (b'{"sessionId": "a", "parentUuid": null, "type": "user"}', "a transcript of Claude Code"),
        (b'{"timestamp": "2026-05-01", "type": "x", "payload": {}}', "a transcript of Codex"),
        (b"<!DOCTYPE html>", "this is a web page or XML"),
        (b"\x04\x22\x4d\x18a", "this is lz4, which is not read: unpack it"),
        (rows(timestamp=lambda time: {"$date": time}).encode(), "got `object` - at `timestamp`"),
        (rows(hash_ids=lambda ids: [ids]).encode(), r"got `array` - at `hash_ids\[0\]`"),
        (rows(timestamp=lambda time: "01/05/2024").encode(), "nor a date in ISO 8601"),
    ],
)
def test_a_file_without_requests_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises((FormatError, TraceError), match=reason):
        load(str(file))


def test_nan_is_a_missing_value(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(TEXT + '{"timestamp": NaN, "input_length": 9, "output_length": NaN}\n')
    workload, repairs = load(str(file))
    assert len(workload) == 7
    assert "1 request without a time: at the time of the first" in repairs.notes
    assert "1 request without an output length: 128 tokens assumed" in repairs.notes


def test_defects_name_their_repair(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(TEXT + '{"timestamp": 900, "input_length": -1}\n' * 3)
    with pytest.raises(TraceError, match=r"2 more lines like it\); with --repair: dropped the"):
        load(str(file))


def test_rows_of_tables_may_be_records(tmp_path: Path) -> None:
    file = tmp_path / "azure"
    header, row = (line.split(",") for line in AZURE.splitlines())
    file.write_text(json.dumps(dict(zip(header, row, strict=True))))
    workload, repairs = load(str(file))
    assert [round_.input_tokens for round_ in workload.rounds] == [374]
    assert ": Azure's LLM inference trace, " in repairs.summary


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables_have_delimiters_and_an_index(tmp_path: Path, delimiter: str) -> None:
    file = tmp_path / "azure.csv"
    header, row = AZURE.splitlines()
    file.write_text(f",{header}\r\n0,{row}\r\n1,{row}".replace(",", delimiter))
    assert [round_.input_tokens for round_ in load(str(file))[0].rounds] == [374, 374]


def test_a_folder_may_hold_other_files(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A trace")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "license.json").write_text('{"license": "MIT"}')
    with pytest.raises(TraceError, match="no requests in this file"):
        load(str(tmp_path))
    (tmp_path / "trace.jsonl").write_text(TEXT)
    workload, repairs = load(str(tmp_path))
    assert len(workload) == 6
    assert repairs.notes == ["left out 2 files that are no traces: empty.jsonl, license.json"]
    with pytest.raises(TraceError, match=r"empty.jsonl:1: no requests"):
        load([str(tmp_path / "empty.jsonl"), str(tmp_path / "trace.jsonl")])


def test_files_of_the_same_times_run_side_by_side(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(TEXT)
    _, repairs = load(str(tmp_path))
    assert repairs.notes == ["the times of the files overlap: their requests run side by side"]
    (tmp_path / "b.jsonl").write_text(rows(timestamp=lambda time: time + 1000))
    assert load(str(tmp_path))[1].notes == []


def test_bodies_of_recorded_requests_are_read(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 20}
    for name, record in {
        "batch.jsonl": {"custom_id": "1", "url": "/v1/chat/completions", "body": body},
        "payloads.jsonl": {"timestamp": 0, "payload": body},
    }.items():
        (tmp_path / name).write_text(json.dumps(record) + "\n")
        (round_,) = load(str(tmp_path / name))[0].rounds
        assert (round_.input_tokens, round_.output_tokens) == (77, 20)


def test_conversations_without_messages_are_left_out(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "hi " * 20}, {"from": "gpt", "value": "hello"}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": "e", "conversations": []}, {"conversations": said}]))
    workload, repairs = load(str(file))
    assert len(workload) == 1
    assert "left out 1 conversation without a message" in repairs.notes


TRACES = Path(__file__).parents[3] / "data" / "traces"
DOCUMENTS = sorted(
    path.relative_to(TRACES).as_posix()
    for path in TRACES.rglob("*")
    if path.suffix in (".json", ".jsonl")
    and not path.name.startswith("swe_")  # the text of its tool calls is JSON
)


def respelled(value: Any, spelled: Callable[[int], Any]) -> Any:
    """A JSON value whose integers are spelled otherwise at any depth, with nulls beside them."""
    if isinstance(value, dict):
        return {**{k: respelled(v, spelled) for k, v in value.items()}, "absent": None}
    if isinstance(value, list):
        return [respelled(each, spelled) for each in value]
    exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53
    return spelled(value) if exact else value


@pytest.mark.parametrize("spelled", [float, str])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_integers_of_every_format_may_be_floats_or_texts(
    name: str, spelled: Callable[[int], Any], tmp_path: Path
) -> None:
    text = (TRACES / name).read_text()
    lines = text.splitlines() if name.endswith(".jsonl") else [text]
    changed = tmp_path / name.replace("/", "-")
    changed.write_text(
        "".join(json.dumps(respelled(json.loads(line), spelled)) + "\n" for line in lines)
    )
    assert load(str(changed))[0].rounds == load(str(TRACES / name))[0].rounds


def test_an_empty_cell_is_an_absent_field(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    header = "session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms,arrival_time"
    file.write_text(f"{header}\na,0,0,100,10,,\na,1,110,50,10,,\n")
    first, second = load(str(file))[0].rounds
    assert (first.at_s, second.at_s, second.input_tokens) == (0.0, 0.0, 160)
    file.write_text(f"{header}\na,0,0,,10,5,0\n")
    with pytest.raises(TraceError, match="input_len"):
        load(str(file))


@pytest.mark.parametrize("start", ["[", '{"requests":[', '{"a":'])
def test_deep_json_is_refused(start: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text(start * 20_000)
    with pytest.raises(WorkloadError):
        load(str(file))


def test_no_block_size_is_proposed_without_evidence(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    row = {"timestamp": 0, "input_length": 5000, "output_length": 5, "hash_ids": [1]}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(TraceError, match="--trace-block-size states the tokens per id"):
        load(str(file))


NAMES = {
    *("session_id", "parent_session_id", "trajectory_id", "parent_trajectory_id", "request_id"),
    *("play_id", "wait_for", "agent_id", "shared_prefix_id", "id"),
}
OUTPUTS = {"output_length", "output_tokens", "out", "output_tokens_count"}
TIMES = {"timestamp", "request_received_ms", "event_time_unix_ms"}


def rewritten(value: Any, names: set[str], change: Callable[[Any], Any]) -> Any:
    """A JSON value with fields changed at any depth."""
    if isinstance(value, dict):
        return {
            k: change(v) if k in names and not isinstance(v, dict) else rewritten(v, names, change)
            for k, v in value.items()
        }
    return [rewritten(v, names, change) for v in value] if isinstance(value, list) else value


def rewrite(name: str, file: Path, names: set[str], change: Callable[[Any], Any]) -> int:
    """Write a sample with changed fields; returns the number of changes."""
    changes = 0

    def counted(value: Any) -> Any:
        nonlocal changes
        changes += 1
        return change(value)

    text = (TRACES / name).read_text()
    lines = text.splitlines() if name.endswith(".jsonl") else [text]
    found = [rewritten(json.loads(line), names, counted) for line in lines]
    file.write_text("".join(json.dumps(each) + "\n" for each in found))
    return changes


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_of_every_format_may_be_numbers(name: str, tmp_path: Path) -> None:
    numbers: dict[str, int] = {}

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [number(each) for each in value]
        return numbers.setdefault(value, 10**18 + len(numbers)) if value else value

    rewrite(name, tmp_path / "trace", NAMES, number)
    workload, plain = load(str(tmp_path / "trace"))[0], load(str(TRACES / name))[0]
    assert workload.rounds == plain.rounds
    assert [each.parent for each in workload.sessions] == [each.parent for each in plain.sessions]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_output_without_a_length_is_assumed_and_told(name: str, tmp_path: Path) -> None:
    if not rewrite(name, tmp_path / "trace", OUTPUTS, lambda value: None):
        pytest.skip("no lengths of outputs in this format")
    workload, repairs = load(str(tmp_path / "trace"))
    assert any("without an output length: 128 tokens assumed" in note for note in repairs.notes)
    assert {round_.output_tokens for round_ in workload.rounds} == {128}


@pytest.mark.parametrize(
    ("columns", "row", "told"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "1,374,", 1),
        ("Timestamp,Model,Request tokens,Response tokens", "5,GPT-4,100,", 1),
        ("session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms", "a,0,0,9,,", 1),
        ("chat_id,timestamp,input_length,hash_ids", '7,1,32,"[1, 2]"', 1),
        ("chat_id,timestamp,input_length,output_length,hash_ids", '7,1,32,5,"[1, 2]"', 0),
    ],
)
def test_outputs_of_tables_may_be_missing(
    columns: str, row: str, told: int, tmp_path: Path
) -> None:
    file = tmp_path / "table.csv"
    file.write_text(f"{columns}\n{row}\n")
    workload, repairs = load(str(file))
    assert len(workload) == 1
    assert sum("128 tokens assumed" in note for note in repairs.notes) == told


DATES = {
    "bailian.jsonl": "seconds",
    "dynamo_request_trace.jsonl": "milliseconds",
    "inference_perf_prefixes.jsonl": "seconds",
    "aiperf_text_input.jsonl": "milliseconds",
    "lmcache_agent.jsonl": "microseconds",
}


@pytest.mark.parametrize("name", DATES)
def test_times_of_every_format_may_be_dates(name: str, tmp_path: Path) -> None:
    def date(value: float) -> str:
        return f"{datetime.fromtimestamp(0, UTC) + timedelta(**{DATES[name]: value}):%F %T.%f} UTC"

    assert rewrite(name, tmp_path / "trace", TIMES, date)
    for dated, plain in zip(
        load(str(tmp_path / "trace"))[0].rounds, load(str(TRACES / name))[0].rounds, strict=True
    ):
        assert dated.at_s == pytest.approx(plain.at_s, abs=1e-3)


@pytest.mark.parametrize(
    "times", [("2026-05-01T10:00:00Z", "2026-05-01T10:01:00Z"), (1e9, 1e9 + 60)]
)
def test_tables_of_sessions_have_dates_and_unix_times(
    times: tuple[Any, Any], tmp_path: Path
) -> None:
    header = "session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms,arrival_time"
    file = tmp_path / "rounds.csv"
    file.write_text(f"{header}\na,0,0,9,1,,{times[0]}\nb,0,0,9,1,,{times[1]}\n")
    assert [round_.at_s for round_ in load(str(file))[0].rounds] == [0.0, 60.0]


def test_a_corpus_may_count_in_unix_seconds(tmp_path: Path) -> None:
    def seconds(value: str) -> float:
        return datetime.fromisoformat(value).timestamp()

    rewrite("tracelab_rounds.jsonl", tmp_path / "trace", {"timestamp"}, seconds)
    for one, other in zip(
        load(str(tmp_path / "trace"))[0].rounds,
        load(str(TRACES / "tracelab_rounds.jsonl"))[0].rounds,
        strict=True,
    ):
        assert one.at_s == pytest.approx(other.at_s, abs=1e-3)


def test_texts_beside_the_traces_of_a_folder_are_left_out(tmp_path: Path) -> None:
    """An index, or the report of what has written the trace."""
    (tmp_path / "index.jsonl").write_text('{"file": "trace.jsonl", "content": "six requests"}\n')
    assert len(load(str(tmp_path))[0]) == 1
    (tmp_path / "trace.jsonl").write_text(TEXT)
    workload, repairs = load(str(tmp_path))
    assert len(workload) == 6
    assert repairs.notes == ["left out 1 file that is no trace: index.jsonl"]
    with pytest.raises(FormatError, match="name those alone"):
        load([str(tmp_path / "index.jsonl"), str(tmp_path / "trace.jsonl")])
