"""Dynamo's request and agent traces: JSONL records of live servers, bare or in envelopes.

A record of the event `request_end` holds times in Unix milliseconds, tokens, the session
(`agent_context`), and in `replay` the chained hashes of the prompt's blocks. Records of the events
`tool_end` and `tool_error` name the tools between two requests of a session.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import HUMAN, PAUSE, TOOL, Milliseconds, SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.block_ids import match_block_ids
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.recorded import follow
from kvmesh.workload.reading.rows import TraceRow, decoded, packed, parsed, reason_of
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import unix_scales

SCHEMAS = ("dynamo.request.trace.v1", "dynamo.agent.trace.v1")
TOOL_EVENTS = ("tool_end", "tool_error")
EVENTS = ("request_end", *TOOL_EVENTS)
FIXED = ReadOptions()  # the fields name their units


class DynamoContext(Struct, kw_only=True):
    """The session; in an agent trace a session of its own per `trajectory_id`."""

    session_id: str | None = None
    trajectory_id: str | None = None
    parent_session_id: str | None = None
    parent_trajectory_id: str | None = None
    trajectory_final: bool = False
    session_final: bool = False


class DynamoReplay(Struct, kw_only=True):
    trace_block_size: SomeTokens
    input_length: SomeTokens
    input_sequence_hashes: list[int] = []


class DynamoRequest(Struct, kw_only=True):
    request_id: str = ""
    input_tokens: SomeTokens | None = None
    output_tokens: Tokens | None = None
    request_received_ms: float | str | None = None
    total_time_ms: Milliseconds | None = None
    input_trigger: str = ""
    finish_reason_metadata: dict[str, Any] = {}
    replay: DynamoReplay | None = None


class DynamoRecord(Struct, kw_only=True):
    schema: str
    event_type: str
    event_time_unix_ms: float | str
    agent_context: DynamoContext | None = None
    request: DynamoRequest | None = None
    tool: dict[str, Any] | None = None


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The trace in the files; raises TraceError or OSError."""
    reader = _Reader(repairs)
    for number, file in enumerate(files):
        repairs.file = file.path
        for line, record in file.records():
            reader.add(number, line, record)
    reader.report()
    rows = [row for members in reader.sessions.values() for row in members]
    reader.rescale(rows)
    for members in reader.sessions.values():
        follow(members, overlapping_on_time=True)
        _name_waits(members, reader.tools.get(members[0].session or "", []))
    match_block_ids(rows, files, repairs)
    return Assembly(files, repairs).trace(rows, found=reader.found)


class _Reader:
    def __init__(self, repairs: Repairs) -> None:
        self.sessions: dict[str, list[TraceRow]] = {}
        self.tools: dict[str, list[tuple[float, str, int]]] = {}
        self.found = 0
        self._repairs = repairs
        self._others = self._repeated = 0
        self._names: set[str] = set()

    def add(self, file: int, line: int, text: bytes) -> None:
        try:
            fields = _bare(decoded(text))
            if fields.get("event_type", EVENTS[0]) not in EVENTS:
                self._others += 1
                return
            record = parsed(fields, DynamoRecord)
            if record.event_type in TOOL_EVENTS:
                self._add_tool(record, file)
            elif record.request is None:
                raise msgspec.ValidationError("Object missing required field `request`")
            else:
                self.found += 1
                row = self._row(record, record.request, file, line)
                self._repeated += record.request.request_id in self._names
                self._names.update(filter(None, [record.request.request_id]))
                self.sessions.setdefault(row.session or f"request {self.found}", []).append(row)
        except (msgspec.MsgspecError, ValueError) as error:
            self.found += 1
            self._repairs.note(line, reason_of(error), "dropped the line")

    def report(self) -> None:
        if self._others:
            records = counted(self._others, "record")
            are = "is" if self._others == 1 else "are"
            self._repairs.assume(f"{records} of other events {are} not read")
        if self._repeated:
            self._repairs.assume(
                f"{counted(self._repeated, 'record')} with the request id of an earlier one"
            )

    def rescale(self, rows: list[TraceRow]) -> None:
        """Read the times of requests and tools in another unit, if their size shows one."""
        scales = unix_scales(rows, "ms", self._repairs, option=False)
        for row in rows:
            scale = scales[row.file]
            row.time, row.end = (row.time or 0.0) * scale, (row.end or 0.0) * scale
        for tools in self.tools.values():
            tools[:] = [(time * scales.get(file, 1.0), name, file) for time, name, file in tools]

    def _add_tool(self, record: DynamoRecord, file: int) -> None:
        session, _ = _session(record)
        name = str((record.tool or {}).get("tool_class") or TOOL)
        self.tools.setdefault(session or "", []).append(
            (FIXED.moment(record.event_time_unix_ms, "ms"), name, file)
        )

    def _row(self, record: DynamoRecord, one: DynamoRequest, file: int, line: int) -> TraceRow:
        session, parent = _session(record)
        replay = one.replay
        tokens = replay.input_length if replay else one.input_tokens
        if tokens is None:
            raise msgspec.ValidationError("Object missing required field `input_tokens`")
        took = one.total_time_ms or 0.0
        written = FIXED.moment(record.event_time_unix_ms, "ms")
        received = one.request_received_ms
        begin = written - took if received is None else FIXED.moment(received, "ms")
        cancelled = one.finish_reason_metadata.get("finish_reason") == "cancelled"
        context = record.agent_context or DynamoContext()
        return TraceRow(
            line=line,
            file=file,
            input_length=tokens,
            output_length=one.output_tokens,
            ids=packed(replay.input_sequence_hashes) if replay else [],
            block_size=replay.trace_block_size if replay else 1,
            time=begin,
            end=begin + took if took else max(begin, written),
            delay=-1.0,
            request_id=f"{self.found}",
            session=session,
            parent=parent,
            wait=_wait(one.input_trigger),
            abort_after=max(1, one.output_tokens or 0) if cancelled else None,
            ends=context.trajectory_final or context.session_final,
        )


def _bare(fields: dict[str, Any]) -> dict[str, Any]:
    """The record without the envelope of a sink."""
    event = fields.get("event")
    return event if isinstance(event, dict) and "schema" in event else fields


def _session(record: DynamoRecord) -> tuple[str | None, str | None]:
    """The session of a record, and its parent's."""
    context = record.agent_context or DynamoContext()
    session = context.trajectory_id or context.session_id
    return session, context.parent_trajectory_id or context.parent_session_id


def _wait(trigger: str) -> str:
    if "tool" in trigger:
        return TOOL
    return HUMAN if "user" in trigger else PAUSE


def _name_waits(members: list[TraceRow], tools: list[tuple[float, str, int]]) -> None:
    """Name the waits during which tools ended after the last of them."""
    ends = {row.request_id: row.end or 0.0 for row in members}
    for row in members:
        if row.wait_for:
            since = ends[row.wait_for[0]]
            during = [tool for tool in tools if since <= tool[0] <= (row.time or 0.0)]
            if during:
                row.wait = max(during)[1]
