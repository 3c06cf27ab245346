"""Recognises the format of a trace by its first record or its header."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from kvmesh.workload.errors import Repairs, WorkloadError
from kvmesh.workload.formats import (
    agentic_mooncake,
    arrivals,
    bailian,
    conversations,
    dynamo_trace,
    mooncake,
    native,
    tracelab,
    tracelab_rounds,
    weka,
)
from kvmesh.workload.reading.assembly import ReadTrace
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.rows import decoded
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.text_records import is_text

Reader: TypeAlias = Callable[[Sequence[TraceFile], ReadOptions, Repairs], ReadTrace]


class FormatError(WorkloadError):
    """A file of no known format, or of one that is not read; no such file or profile."""


class TraceFormat(Struct, frozen=True):
    """A format that is read."""

    name: str
    read: Reader


NATIVE = TraceFormat("kvmesh's native workload", native.read)
AGENTIC = TraceFormat("Dynamo's agentic Mooncake v2", agentic_mooncake.read)
DYNAMO = TraceFormat("Dynamo's request trace", dynamo_trace.read)
WEKA = TraceFormat("Weka's agent sessions", weka.read)
ROUNDS = TraceFormat("TraceLab's corpus", tracelab_rounds.read)
TRACELAB = TraceFormat("TraceLab's sessions", tracelab.read)
BAILIAN = TraceFormat("Qwen-Bailian", bailian.read)
MOONCAKE = TraceFormat("Mooncake", mooncake.read)
TEXT = TraceFormat("texts or messages", conversations.read)
AZURE = TraceFormat("Azure's LLM inference trace", arrivals.reader(arrivals.AZURE))
BURSTGPT = TraceFormat("BurstGPT", arrivals.reader(arrivals.BURSTGPT))
PREFIXES = TraceFormat("inference-perf's shared prefixes", arrivals.reader(arrivals.SHARED_PREFIX))
COUNTS = TraceFormat("GuideLLM's token counts", arrivals.reader(arrivals.GUIDELLM_COUNTS))
LENGTHS = TraceFormat("a table of lengths", arrivals.reader(arrivals.LENGTHS))

TABLES = (
    (arrivals.AZURE, AZURE),
    (arrivals.BURSTGPT, BURSTGPT),
    (arrivals.SHARED_PREFIX, PREFIXES),
    (arrivals.GUIDELLM_COUNTS, COUNTS),
    (arrivals.LENGTHS, LENGTHS),
)
TRACELAB_COLUMNS = {"round_idx", "prefix_len", "input_len", "output_len"}
READ = (
    "Mooncake, its increments and agentic forms, Dynamo's request traces, Weka's sessions, "
    "TraceLab, Qwen-Bailian, Azure, BurstGPT, texts and messages, kvmesh's own"
)

# Formats that are known and not read: a mark in the first bytes or record, the name, the way out.
BINARY = {
    b"\xff\xfe": ("text in UTF-16 or UTF-32", "write it as UTF-8"),
    b"\xfe\xff": ("text in UTF-16 or UTF-32", "write it as UTF-8"),
    b"PAR1": (
        "Parquet",
        "write it as JSON lines (pandas: `to_json(lines=True)`)",
    ),
    b"ARROW1": ("Arrow", "write it as JSON lines (`datasets`: `to_json`)"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("zstandard", "unpack it, or pack it with gzip"),
    b"BZh": ("bzip2", "unpack it, or pack it with gzip"),
    b"\xfd7zXZ": ("xz", "unpack it, or pack it with gzip"),
    b"FEA1": ("Feather", "write it as JSON lines (pandas: `to_json(lines=True)`)"),
    b"Obj\x01": ("Avro", "write it as JSON lines"),
    b"ORC": ("ORC", "write it as JSON lines"),
    b"version https://git-lfs": ("a pointer of Git LFS", "fetch the file (`git lfs pull`)"),
    b"SQLite format 3": ("an SQLite database", "export its rows as JSON lines"),
    b"\x89HDF\r\n": ("HDF5", "write it as JSON lines (pandas: `to_json(lines=True)`)"),
    b"\x93NUMPY": ("a NumPy array", "write its rows as JSON lines"),
    b"\x04\x22\x4d\x18": ("lz4", "unpack it, or pack it with gzip"),
    b"\xff\x06\0\0sNaPpY": ("snappy", "unpack it, or pack it with gzip"),
    b"\x1f\x9d": ("packed by `compress`", "unpack it, or pack it with gzip"),
    b"7z\xbc\xaf": ("a 7-Zip archive", "unpack it"),
    b"Rar!": ("a RAR archive", "unpack it"),
    b"<": ("a web page or XML", "fetch the file itself, or write it as JSON lines"),
}
TRANSCRIPT = "run the agent against a mesh and capture it (`kvmesh workload capture`)"
OTHERS: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"resourceSpans"}), "OpenTelemetry spans", "convert them to Mooncake rows"),
    (frozenset({"spans"}), "OpenTelemetry spans", "convert them to Mooncake rows"),
    (frozenset({"traceId", "spanId"}), "OpenTelemetry spans", "convert them to Mooncake rows"),
    (frozenset({"traceEvents"}), "a Chrome or Perfetto timeline", "it holds no requests"),
    (frozenset({"captureData"}), "SageMaker's data capture", "extract its messages"),
    (
        frozenset({"num_turns", "tool_call_latency"}),
        "Applied Compute's agentic summaries",
        "convert them to Mooncake rows with `delay`",
    ),
    (
        frozenset({"metadata", "metrics"}),
        "AIPerf's records of a run",
        "read the trace that the run was made from",
    ),
    (
        frozenset({"benchmarks"}),
        "GuideLLM's report of a run",
        "read the data that the run was made from",
    ),
    (
        frozenset({"ttfts", "itls"}),
        "the result of `vllm bench`",
        "read the data set that it was made from",
    ),
    (frozenset({"parentUuid", "sessionId"}), "a transcript of Claude Code", TRANSCRIPT),
    (frozenset({"sessionId", "uuid", "message"}), "a transcript of Claude Code", TRANSCRIPT),
    (frozenset({"timestamp", "type", "payload"}), "a transcript of Codex", TRANSCRIPT),
    (frozenset({"payloads"}), "AIPerf's inputs.json", "extract their messages or prompts"),
    (frozenset({"forks"}), "AIPerf's DAG", "convert it to agentic Mooncake v2"),
    (frozenset({"spawns"}), "AIPerf's DAG", "convert it to agentic Mooncake v2"),
)
RECORDS_HINT = "a record is a line, an item of one array, or the whole file (`jq -c .` makes lines)"


def format_of(file: TraceFile) -> TraceFormat:
    """The format of a file by its content; raises FormatError, TraceError or OSError."""
    if not file.head:
        raise file.error(1, "no requests in this file")
    start = file.head[0]
    for mark, (name, way_out) in BINARY.items():
        if start.startswith(mark):
            raise FormatError(f"{file}: this is {name}, which is not read: {way_out}")
    if start[257:262] == b"ustar":
        raise FormatError(f"{file}: this is a tar archive, which is not read: unpack it")
    if b"\0" in start or _undecodable(start):
        raise FormatError(f"{file}: this is no text: unpack it, or write it as JSON lines in UTF-8")
    if not file.is_json:
        return _of_table(file)
    records = _records(file)
    if not records:
        raise file.error(1, "no requests in this file")
    for fields in records:
        found = _of_record(file, fields)
        if found is not None:
            return found
    inside = _list_in(records[0]) if len(records) == 1 and not file.inside else None
    if inside is not None:
        file.inside = inside
        return format_of(file)
    return _unknown(file, f"its records ({_some(records[0])})")


def _undecodable(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return False


def _list_in(fields: Mapping[str, Any]) -> str | None:
    """The name of the only list of objects in a document."""
    lists = [
        name
        for name, value in fields.items()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    ]
    return lists[0] if len(lists) == 1 else None


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "nothing"


def _records(file: TraceFile) -> list[dict[str, Any]]:
    """The first records that are objects; raises TraceError if there are none."""
    found: list[dict[str, Any]] = []
    failure: msgspec.MsgspecError | None = None
    for _, (_, record) in zip(range(len(file.head)), file.records(), strict=False):
        try:
            found.append(decoded(record))
        except msgspec.MsgspecError as error:
            failure = failure or error
    if not found and failure is not None:
        raise file.error(1, str(failure), RECORDS_HINT) from failure
    return found


def _of_record(file: TraceFile, fields: Mapping[str, Any]) -> TraceFormat | None:
    keys = fields.keys()
    event = fields.get("event")
    schema = fields.get("schema")
    if isinstance(event, dict):
        schema = event.get("schema", schema)
    if isinstance(schema, str):
        return _of_schema(file, schema)
    if str(fields.get("format", "")).startswith("kvmesh.") or {"branches", "rounds"} <= keys:
        return NATIVE
    if "requests" in keys and ("block_size" in keys or "hash_id_scope" in keys):
        return WEKA
    if {"round_index", "prefix_tokens", "newly_append_tokens"} & keys == {
        "round_index",
        "prefix_tokens",
        "newly_append_tokens",
    }:
        return ROUNDS
    if "chat_id" in keys and ("hash_ids" in keys or "parent_chat_id" in keys):
        return BAILIAN
    named = [name for name in ("input_length", "hash_ids", "timestamp") if name in keys]
    if named and all(_is_column(fields[name], name) for name in named):
        raise FormatError(
            f"{file}: this is a table by columns, which is not read: write its rows as JSON "
            "lines (pandas: `to_json(orient='records', lines=True)`)"
        )
    for marks, name, way_out in OTHERS:
        if marks <= keys or any(marks <= turn.keys() for turn in _turns(fields)):
            raise FormatError(f"{file}: this is {name}, which is not read: {way_out}")
    return _of_lengths(fields)


def _is_column(value: Any, name: str) -> bool:
    """True if a field that is one value in a row, or one list, holds those of many."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and (name != "hash_ids" or any(map(_is_list, value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _turns(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = fields.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _of_lengths(fields: Mapping[str, Any]) -> TraceFormat | None:
    columns = {name.strip().lower() for name in fields}
    found = next((each for table, each in TABLES if table.fits(columns)), None)
    if found not in (None, COUNTS, LENGTHS):
        return found
    if is_text(fields):
        return TEXT
    if found is COUNTS:
        return COUNTS
    known = {"hash_ids", "input_length", "input_tokens", "output_length", "timestamp"}
    return MOONCAKE if len(known & fields.keys()) > 1 else None


def _of_schema(file: TraceFile, schema: str) -> TraceFormat:
    if schema == agentic_mooncake.SCHEMA:
        return AGENTIC
    if schema in dynamo_trace.SCHEMAS:
        return DYNAMO
    known = ", ".join((agentic_mooncake.SCHEMA, *dynamo_trace.SCHEMAS))
    raise FormatError(f"{file}: schema {schema!r} is not read, only {known}")


def _of_table(file: TraceFile) -> TraceFormat:
    columns = set(file.table().columns)
    if "chat_id" in columns:
        return BAILIAN
    if {"hash_ids", "input_length"} <= columns:
        return MOONCAKE
    if columns >= TRACELAB_COLUMNS:
        return TRACELAB
    found = next((each for table, each in TABLES if table.fits(columns)), None)
    if found in (None, COUNTS, LENGTHS) and is_text(dict.fromkeys(columns, "text")):
        return TEXT  # which says more than its length
    if found is not None:
        return found
    return _unknown(file, f"its columns ({_some(columns)})")


def _unknown(file: TraceFile, what: str) -> TraceFormat:
    raise FormatError(f"{file}: no known format has {what}; known are {READ} (docs/workloads.md)")
