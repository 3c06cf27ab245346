"""Mooncake traces, plain and agentic: JSONL with lengths and the ids of 512-token blocks.

Plain rows (Mooncake, FAST'25) hold `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`; an id identifies a block and all blocks before it. Rows with one `session_id` are
closed-loop turns: a turn starts `delay` ms after the end of the previous one. Agentic rows add
`request_id`, `wait_for` (ids of requests that must have ended) and `tool_wait_ms`. AIPerf and
Dynamo's `mooncake-delta` spell later turns of a session as increments of the prompt.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import TOOL, Milliseconds, Priority, SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.block_ids import match_block_ids
from kvmesh.workload.reading.options import MILLISECONDS, ReadOptions, date
from kvmesh.workload.reading.rows import (
    TraceRow,
    decoded,
    note_unread,
    packed,
    parsed,
    prompt_tokens,
    reason_of,
)
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import rescale_unix_times
from kvmesh.workload.reading.turns import apply_turns, note_overlaps

BLOCK_SIZE = 512


class MooncakeRow(Struct, kw_only=True, omit_defaults=True):
    """One line.

    `block_size`, `priority`, `fair_class`, `abort_after` and `parent_session_id` are extensions;
    the last five fields are other spellings.
    """

    input_length: SomeTokens | None = None
    output_length: Tokens | None = None
    hash_ids: list[int] | None = None
    timestamp: float | None = None
    request_id: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    delay: Milliseconds | None = None
    tool_wait_ms: Milliseconds | None = None
    wait_for: list[str] = []
    priority: Priority = 0
    fair_class: str = ""
    abort_after: SomeTokens | None = None
    block_size: SomeTokens | None = None
    input_tokens: SomeTokens | None = None
    output_tokens: Tokens | None = None
    created_time: float | None = None
    delay_ms: Milliseconds | None = None


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The trace in the files; raises TraceError or OSError."""
    reader = _Reader(options, repairs)
    for number, file in enumerate(files):
        repairs.file = file.path
        for line, record in file.records() if file.is_json else file.table():
            reader.add(number, line, record)
    reader.report()
    rows = reader.rows
    rescale_unix_times(rows, options, "ms", repairs)
    note_overlaps(rows, len(files), repairs)
    match_block_ids(rows, files, repairs)
    apply_turns(rows, options, repairs)
    return Assembly(files, repairs).trace(rows, ordered=True, found=reader.found)


class _Reader:
    """Collects the rows of all files, and counts what they leave out."""

    def __init__(self, options: ReadOptions, repairs: Repairs) -> None:
        self.rows: list[TraceRow] = []
        self.found = 0
        self._options = options
        self._unit = MILLISECONDS[options.time_unit or "ms"]
        self._block_size = options.trace_block_size or BLOCK_SIZE
        self._dates = 0
        self._repairs = repairs
        self._decode = msgspec.json.Decoder(MooncakeRow).decode
        self._file = -1

    def add(self, file: int, line: int, record: bytes | str | dict[str, Any]) -> None:
        self.found += 1
        try:
            if file != self._file:
                self._file = file
                note_unread(decoded(record), MooncakeRow.__struct_fields__, self._repairs)
            row = self._row(self._parse(record), file, line)
        except (msgspec.MsgspecError, ValueError) as error:
            self._repairs.note(line, reason_of(error), "dropped the line")
        else:
            self.rows.append(row)

    def _parse(self, record: bytes | str | dict[str, Any]) -> MooncakeRow:
        if isinstance(record, bytes):
            try:
                return self._decode(record)
            except msgspec.DecodeError:
                pass
        fields = decoded(record)
        if isinstance(fields.get("wait_for"), str):
            fields["wait_for"] = [fields["wait_for"]] if fields["wait_for"] else []
        for name in ("timestamp", "created_time"):
            if isinstance(value := fields.get(name), str) and value:
                fields[name] = self._time(value)
        return parsed(fields, MooncakeRow)

    def _time(self, text: str) -> float:
        """The number of units of a number or a date as text; raises ValueError."""
        try:
            return float(text)
        except ValueError:
            self._dates += 1
            return date(text) / self._unit

    def report(self) -> None:
        """Mark the options on which rows depend."""
        used, size = self._options.used, self._options.trace_block_size
        if any(row.ids and row.block_size == size for row in self.rows if size):
            used.add("trace_block_size")
        if self._options.time_unit is not None:
            numbers = sum(row.time is not None for row in self.rows) - self._dates
            if numbers > 0 or any(row.delay for row in self.rows):
                used.add("time_unit")

    def _row(self, row: MooncakeRow, file: int, line: int) -> TraceRow:
        ids = row.hash_ids or []
        size = row.block_size or self._block_size
        stated = row.input_length or row.input_tokens
        output = row.output_tokens if row.output_length is None else row.output_length
        time = row.created_time if row.timestamp is None else row.timestamp
        delay = row.delay_ms if row.delay is None else row.delay * self._unit
        wait = row.tool_wait_ms or 0.0
        return TraceRow(
            line=line,
            file=file,
            input_length=prompt_tokens(stated, ids, size, self._repairs),
            output_length=output,
            ids=packed(ids),
            block_size=size,
            time=None if time is None else time * self._unit,
            request_id=row.request_id or None,
            session=row.session_id or None,
            parent=row.parent_session_id or None,
            wait_for=row.wait_for or (),
            chained=delay is not None or time is None,
            delay=delay + wait if delay and wait else delay or wait,
            wait=TOOL if row.tool_wait_ms else "",
            priority=row.priority,
            fair_class=row.fair_class,
            abort_after=row.abort_after,
        )
