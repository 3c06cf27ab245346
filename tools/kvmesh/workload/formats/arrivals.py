"""Traces of arrivals and lengths only: Azure's and BurstGPT's tables, and others of the kind.

Their prompts share nothing, unless a row names the prefix that it shares (inference-perf's traces
of shared prefixes).
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.options import ReadOptions, TimeUnit
from kvmesh.workload.reading.rows import (
    TraceRow,
    decoded,
    note_unread,
    parsed,
    reason_of,
)
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import rescale_unix_times


class ArrivalRow(Struct, kw_only=True):
    """A row under common names; `timestamp` is a number or a date, `prefix` the id of a prefix."""

    input_length: SomeTokens
    output_length: Tokens | None = None
    timestamp: float | str | None = None
    session: str | None = None
    prefix: str | None = None
    prefix_length: Tokens = 0


class ArrivalTable(Struct, frozen=True):
    """A kind of table: the names of its columns in lower case, and the unit of its times."""

    columns: dict[str, str]
    unit: TimeUnit
    failed: bool = False

    def fits(self, columns: set[str]) -> bool:
        """True if a table with these columns (in lower case) is of this kind."""
        needed = {name for name, field in self.columns.items() if field in _NEEDED}
        return needed <= columns


_NEEDED = ("input_length", "output_length")
AZURE = ArrivalTable(
    {
        "timestamp": "timestamp",
        "contexttokens": "input_length",
        "generatedtokens": "output_length",
    },
    "s",
)
BURSTGPT = ArrivalTable(
    {
        "timestamp": "timestamp",
        "session id": "session",
        "request tokens": "input_length",
        "response tokens": "output_length",
    },
    "s",
    failed=True,
)
SHARED_PREFIX = ArrivalTable(
    {
        "timestamp": "timestamp",
        "shared_prefix_id": "prefix",
        "shared_prefix_length": "prefix_length",
        "tail_input_length": "input_length",
        "output_length": "output_length",
    },
    "s",
)
GUIDELLM_COUNTS = ArrivalTable(
    {
        "relative_timestamp": "timestamp",
        "prompt_tokens_count": "input_length",
        "output_tokens_count": "output_length",
    },
    "s",
)
LENGTHS = ArrivalTable(
    {
        "timestamp": "timestamp",
        "session_id": "session",
        "input_length": "input_length",
        "output_length": "output_length",
    },
    "ms",
)


def reader(
    table: ArrivalTable,
) -> Callable[[Sequence[TraceFile], ReadOptions, Repairs], ReadTrace]:
    """The reader of a kind of table, as CSV or as JSON records."""

    def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
        """The trace in the files, at its recorded times; raises TraceError or OSError."""
        return _Reader(table, files, options, repairs).trace()

    return read


class _Reader:
    def __init__(
        self,
        table: ArrivalTable,
        files: Sequence[TraceFile],
        options: ReadOptions,
        repairs: Repairs,
    ) -> None:
        self._table = table
        self._files = files
        self._repairs = repairs
        self._options = options
        self._assembly = Assembly(files, repairs)
        self._prefixes: dict[str, int] = {}
        self._failed = 0
        self._seen = False

    def trace(self) -> ReadTrace:
        rows: list[TraceRow] = []
        found = 0
        for number, file in enumerate(self._files):
            self._repairs.file = file.path
            for line, fields in file.records() if file.is_json else file.table():
                found += 1
                try:
                    one = self._parse(fields)
                    row = self._row(one, number, line)
                except (msgspec.MsgspecError, ValueError) as error:
                    self._repairs.note(line, reason_of(error), "dropped the line")
                    continue
                if self._table.failed and one.output_length == 0:
                    self._failed += 1
                else:
                    rows.append(row)
        self._report(rows)
        rescale_unix_times(rows, self._options, self._table.unit, self._repairs)
        return self._assembly.trace(rows, found=found)

    def _parse(self, fields: bytes | str | dict[str, Any]) -> ArrivalRow:
        columns = self._table.columns
        lower = {name.strip().lower(): value for name, value in decoded(fields).items()}
        if not self._seen:
            self._seen = True
            note_unread(lower, columns, self._repairs)
        named = {columns[name]: value for name, value in lower.items() if name in columns}
        if named.get("input_length") in (0, "0") and named.get("prefix_length"):
            named["input_length"] = 1
        return parsed(named, ArrivalRow)

    def _row(self, one: ArrivalRow, file: int, line: int) -> TraceRow:
        branch, time = None, one.timestamp
        if one.prefix_length:
            if one.prefix is None:
                self._repairs.assume("rows without `shared_prefix_id` share one prefix")
            name = one.prefix or ""
            if name not in self._prefixes:
                self._prefixes[name] = self._assembly.tree.fork()
            branch = self._assembly.tree.fork(self._prefixes[name], one.prefix_length)
        return TraceRow(
            line=line,
            file=file,
            input_length=one.prefix_length + one.input_length,
            output_length=one.output_length,
            branch=branch,
            time=None if time is None else self._options.moment(time, self._table.unit),
            session=one.session,
        )

    def _report(self, rows: list[TraceRow]) -> None:
        assume = self._repairs.assume
        if self._failed:
            assume(f"left out {counted(self._failed, 'failed request')} (no response tokens)")
        alone = sum(row.branch is None for row in rows)
        if alone:
            prompts = counted(alone, "prompt")
            assume(f"nothing shares {prompts}: the format has lengths without contents")
