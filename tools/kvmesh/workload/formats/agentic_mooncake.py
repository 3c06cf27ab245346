"""Dynamo's agentic Mooncake, version 2: requests of plays with typed dependencies.

The first line is a header with the tokens per block and the scope of block ids: those of scope
`local` mean the same in all plays of a file. A request starts `not_before_ms` after the start of
its play, and `delay_ms` after each dependency: after the other request's end (`completion`), or
after its start (`dispatch`).
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import LIMIT, Milliseconds, SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.block_ids import match_block_ids
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.rows import (
    TraceRow,
    decoded,
    packed,
    parsed,
    prompt_tokens,
    reason_of,
    record_of,
)
from kvmesh.workload.reading.source import TraceFile

SCHEMA: Final = "dynamo.agentic_mooncake"
VERSION = 2


class AgenticHeader(Struct, kw_only=True):
    schema: Literal["dynamo.agentic_mooncake"]
    version: int
    block_size: SomeTokens
    hash_id_scope: Literal["local", "global"] = "local"
    source: dict[str, Any] = {}


class AgenticDependency(Struct, kw_only=True):
    request_id: str
    trigger: Literal["dispatch", "completion"] = "completion"
    relation: str = "sequence"
    delay_ms: Milliseconds = 0.0


class AgenticRow(Struct, kw_only=True, omit_defaults=True):
    request_id: str
    play_id: str
    session_id: str
    model: str = ""
    input_length: SomeTokens | None = None
    output_length: Tokens | None = None
    input_tokens: SomeTokens | None = None
    output_tokens: Tokens | None = None
    hash_ids: list[int] = []
    not_before_ms: float = 0.0
    priority: int = 0
    policy_class: str = ""
    dependencies: list[AgenticDependency] = []


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The trace in the files; raises TraceError or OSError."""
    plays: set[str] = set()
    rows: list[TraceRow] = []
    waits: dict[str, tuple[TraceRow, list[AgenticDependency]]] = {}
    found = timed = late = 0
    for number, file in enumerate(files):
        repairs.file = file.path
        records = file.records()
        header = _header(file, next(records))
        for line, record in records:
            found += 1
            try:
                one = parsed(decoded(record), AgenticRow)
                _set_apart(one, f"{number + 1}/" if len(files) > 1 else "")
                row = _row(one, header, number, line, repairs)
            except msgspec.MsgspecError as error:
                repairs.note(line, reason_of(error), "dropped the line")
                continue
            if header.hash_id_scope == "local":
                row.scope = number + 1
            plays.add(f"{number}/{one.play_id}")
            timed += one.not_before_ms > 0
            late += one.not_before_ms > 0 and bool(one.dependencies)
            rows.append(row)
            waits[one.request_id] = (row, one.dependencies)
    _set_waits(waits)
    if len(plays) > 1 and not timed:
        repairs.assume(f"{len(plays):,} plays start together: the file has no times between them")
    if late:
        repairs.assume(f"{late:,} requests with dependencies start without their not_before_ms")
    match_block_ids(rows, files, repairs)
    return Assembly(files, repairs).trace(rows, found=found)


def _header(file: TraceFile, record: tuple[int, bytes]) -> AgenticHeader:
    line, text = record
    try:
        header = record_of(text, AgenticHeader)
    except msgspec.MsgspecError as error:
        raise file.error(line, reason_of(error)) from error
    if header.version != VERSION:
        raise file.error(
            line, f"version {header.version} of {SCHEMA} is not read, only version {VERSION}"
        )
    return header


def _set_apart(one: AgenticRow, file: str) -> None:
    """Names are those of a file: put it before them."""
    one.request_id, one.session_id = file + one.request_id, file + one.session_id
    for each in one.dependencies:
        each.request_id = file + each.request_id


def _row(
    one: AgenticRow, header: AgenticHeader, file: int, line: int, repairs: Repairs
) -> TraceRow:
    size = header.block_size
    stated = one.input_length or one.input_tokens
    output = one.output_tokens if one.output_length is None else one.output_length
    return TraceRow(
        line=line,
        file=file,
        input_length=prompt_tokens(stated, one.hash_ids, size, repairs),
        output_length=output,
        ids=packed(one.hash_ids),
        block_size=size,
        time=None if one.dependencies else one.not_before_ms,
        request_id=one.request_id,
        session=one.session_id,
        priority=max(-LIMIT, min(one.priority, LIMIT)),
        fair_class=one.policy_class,
    )


def _set_waits(waits: dict[str, tuple[TraceRow, list[AgenticDependency]]]) -> None:
    """Translate dependencies into waits for ends.

    A recorded start fits all dependencies, so the one that ends last has the shortest delay.
    """
    for row, dependencies in waits.values():
        completions = [each for each in dependencies if each.trigger == "completion"]
        row.wait_for = [each.request_id for each in completions]
        row.delay = min((each.delay_ms for each in completions), default=0.0)
    for row, dependencies in waits.values():
        _follow_dispatch(row, dependencies, waits)
        if row.parent is None:
            row.parent = _parent(row, dependencies, waits)


def _follow_dispatch(
    row: TraceRow,
    dependencies: list[AgenticDependency],
    waits: dict[str, tuple[TraceRow, list[AgenticDependency]]],
) -> None:
    """Let a row that starts with another wait for the same ends as that one, or share its time."""
    if row.wait_for or not dependencies:
        return
    seen: set[str] = set()
    delay = 0.0
    chain = dependencies
    while chain and chain[0].trigger == "dispatch":
        if chain[0].request_id in seen:
            row.wait_for = [row.request_id or ""]  # a cycle, as one of completions
            return
        seen.add(chain[0].request_id)
        delay += chain[0].delay_ms
        if chain[0].request_id not in waits:
            row.wait_for = [chain[0].request_id]
            return
        other, chain = waits[chain[0].request_id]
        row.wait_for, row.delay = list(other.wait_for), other.delay + delay
        row.time = None if other.time is None else other.time + delay


def _parent(
    row: TraceRow,
    dependencies: list[AgenticDependency],
    waits: dict[str, tuple[TraceRow, list[AgenticDependency]]],
) -> str | None:
    """The session that spawned a row's session."""
    for each in dependencies:
        if each.relation == "spawn" and each.request_id in waits:
            return waits[each.request_id][0].session
    return None
