"""TraceLab session traces: CSV, one closed-loop round per line.

Columns: `session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms`;
`id` is another spelling of the first, and a file without `arrival_time` starts all sessions at 0. A
round's prompt is the first `prefix_len` tokens of the session's context plus `input_len` new ones;
the next round starts `tool_wait_after_ms` after its end. `arrival_time` (ms) starts the session.
"""

import csv
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Problem, Repairs, TraceError, WorkloadError
from kvmesh.workload.model import LIMIT, Milliseconds, Round, Session, Tokens, Workload
from kvmesh.workload.reading.assembly import UNIT_HINT, ReadTrace
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.rows import OUTPUT_TOKENS, note_outputs, note_unread, parsed, reason_of
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import (
    note_doubtful_pace,
    note_doubtful_waits,
    unix_scale,
)
from kvmesh.workload.reading.window import planned_starts
from kvmesh.workload.tree import Tree


class TracelabRow(Struct, kw_only=True):
    session_id: str
    arrival_time: float = 0.0
    round_idx: Tokens
    prefix_len: Tokens
    input_len: Tokens
    output_len: Tokens | None = None
    tool_wait_after_ms: Milliseconds = 0.0


COLUMNS = tuple(TracelabRow.__struct_fields__)


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The sessions in the files; raises TraceError or OSError."""
    sessions: list[list[tuple[int, TracelabRow]]] = []
    paths: dict[int, Path] = {}
    known: dict[str, list[tuple[int, TracelabRow]]] = {}
    again = 0
    for file in files:
        repairs.file = file.path
        for name, rows in _sessions(file, options, repairs).items():
            before = known.get(name, [])
            if before and _rounds(before).isdisjoint(_rounds(rows)):
                before += rows
                before.sort(key=_round_of)
                continue
            again += bool(before)
            known[name] = rows
            sessions.append(rows)
            paths[id(rows)] = file.path
    if again:
        repairs.assume(f"{counted(again, 'session')} with the name of one in another file")
    if not sessions:
        nothing = Problem(1, "no sessions in this file", "")
        raise TraceError(files[0].path, repairs.problems or [nothing])
    if len(sessions) > 1 and not any(rows[0][1].arrival_time for rows in sessions):
        repairs.assume("all sessions start at once: the file has no arrival times")
    sessions.sort(key=lambda rows: rows[0][1].arrival_time)
    several = sum(len({row.arrival_time for _, row in rows}) > 1 for rows in sessions)
    if several:
        repairs.assume(
            f"{counted(several, 'session')} with several arrival times: the first counts"
        )
    _normalise_times(sessions, paths, options, repairs)
    every = [row for rows in sessions for _, row in rows]
    note_doubtful_waits([row.tool_wait_after_ms for row in every], repairs)
    missing = [row for row in every if row.output_len is None]
    for row in missing:
        row.output_len = OUTPUT_TOKENS
    note_outputs(len(missing), repairs)
    workload = _assemble(sessions, paths, repairs)
    first = sum(rows[0][1].prefix_len for rows in sessions)
    if first:
        repairs.assume(
            f"first rounds name {first:,} prefix tokens of no known prompt: they count as new"
        )
    repairs.check(len(workload))
    return ReadTrace(workload=workload, starts=planned_starts(workload))


def _round_of(numbered: tuple[int, TracelabRow]) -> int:
    return numbered[1].round_idx


def _rounds(rows: list[tuple[int, TracelabRow]]) -> set[int]:
    return {row.round_idx for _, row in rows}


def _sessions(
    file: TraceFile, options: ReadOptions, repairs: Repairs
) -> dict[str, list[tuple[int, TracelabRow]]]:
    sessions: dict[str, list[tuple[int, TracelabRow]]] = {}
    table = file.table()
    missing = [name for name in COLUMNS if name not in _named(dict.fromkeys(table.columns, ""))]
    missing = [name for name in missing if name != "arrival_time"]
    if missing:
        raise file.error(1, f"missing column {', '.join(missing)}")
    note_unread(table.columns, (*COLUMNS, "id"), repairs)
    for number, fields in table:
        if isinstance(fields, str):
            repairs.note(number, fields, "dropped the line")
            continue
        try:
            named = _named(fields)
            named["arrival_time"] = _arrival(named.get("arrival_time"), options)
            if not isfinite(named["arrival_time"]):
                raise ValueError("a finite number expected - at `arrival_time`")
            row = parsed(named, TracelabRow)
        except (msgspec.ValidationError, ValueError) as error:
            repairs.note(number, reason_of(error), "dropped the line")
            continue
        sessions.setdefault(row.session_id, []).append((number, row))
    return sessions


def _arrival(value: Any, options: ReadOptions) -> float:
    return options.moment(value, "ms") if value else 0.0


def _named(fields: dict[str, str]) -> dict[str, Any]:
    """The fields under their usual names."""
    return {"session_id" if name == "id" else name: value for name, value in fields.items()}


def _normalise_times(
    sessions: list[list[tuple[int, TracelabRow]]],
    paths: dict[int, Path],
    options: ReadOptions,
    repairs: Repairs,
) -> None:
    """Let the first session start at 0, and drop those that start too long after it."""
    firsts = [rows[0][1] for rows in sessions]
    origin = firsts[0].arrival_time
    scale = 1.0
    if options.time_unit is None:
        scale = unix_scale((row.arrival_time for row in firsts), "ms", repairs)
    note_doubtful_pace([row.arrival_time * scale for row in firsts], repairs)
    for rows in list(sessions):
        line, first = rows[0]
        first.arrival_time = (first.arrival_time - origin) * scale
        if not first.arrival_time <= LIMIT * 1e3:
            repairs.file = paths[id(rows)]
            reason = f"arrival_time {first.arrival_time:g} ms after that of the first session"
            repairs.note(line, reason, "dropped the session", UNIT_HINT)
            sessions.remove(rows)


def _assemble(
    sessions: list[list[tuple[int, TracelabRow]]], paths: dict[int, Path], repairs: Repairs
) -> Workload:
    tree = Tree()
    drafts: list[tuple[float, int, Round]] = []
    for index, rows in enumerate(sessions):
        repairs.file = paths[id(rows)]
        _order(rows, repairs)
        drafts.extend(_chain(index, rows, tree, repairs))
    drafts.sort(key=lambda draft: draft[0])
    return Workload(
        tree=tree,
        sessions=[Session(name=rows[0][1].session_id) for rows in sessions],
        rounds=_number(drafts),
    )


def _order(rows: list[tuple[int, TracelabRow]], repairs: Repairs) -> None:
    expected = list(range(len(rows)))
    for (line, row), round_idx in zip(rows, expected, strict=True):
        if row.round_idx != round_idx:
            reason = f"round {row.round_idx} of session {row.session_id}, expected {round_idx}"
            repairs.note(line, reason, "renumbered the rounds")
            rows.sort(key=_round_of)
            return


def _chain(
    session: int, rows: list[tuple[int, TracelabRow]], tree: Tree, repairs: Repairs
) -> list[tuple[float, int, Round]]:
    """(earliest start in seconds, index in the session, round) of a session's rounds."""
    branch, held, clock, wait_s = tree.fork(), 0, rows[0][1].arrival_time / 1e3, 0.0
    chain: list[tuple[float, int, Round]] = []
    for index, (line, row) in enumerate(rows):
        prefix, tokens = row.prefix_len, row.prefix_len + row.input_len
        if index and prefix > held:
            reason = f"prefix_len {prefix} exceeds the session's context of {held} tokens"
            repairs.note(line, reason, "counted the excess as new tokens")
            prefix = held
        if tokens == 0:
            repairs.note(line, "empty prompt", "made it one token")
            tokens = 1
        if index and prefix < held:
            branch = tree.fork(branch, prefix)
        round_ = Round(
            session=session,
            branch=branch,
            output_branch=branch,
            input_tokens=tokens,
            output_tokens=row.output_len or 0,
            at_s=wait_s if index else clock,
            wait="tool" if wait_s else "",
        )
        clock += wait_s
        chain.append((clock, index, round_))
        held = tokens + round_.output_tokens
        wait_s = row.tool_wait_after_ms / 1e3
    return chain


def _number(drafts: list[tuple[float, int, Round]]) -> list[Round]:
    """The rounds in order, each waiting for its session's previous one."""
    last: dict[int, int] = {}
    rounds: list[Round] = []
    for _, index, round_ in drafts:
        after = (last[round_.session],) if index else ()
        last[round_.session] = len(rounds)
        rounds.append(msgspec.structs.replace(round_, after=after))
    return rounds


def write(workload: Workload, file: Path) -> list[str]:
    """Write the sessions; return the properties that the format cannot hold.

    Raises WorkloadError for a session that is not closed-loop.
    """
    lines = [
        _line(workload, session, members, position, index)
        for session, members in enumerate(workload.by_session())
        for position, index in enumerate(members)
    ]
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *lines])
    return _losses(workload)


def _line(
    workload: Workload, session: int, members: list[int], position: int, index: int
) -> list[str | int]:
    rounds = workload.rounds
    round_, prefix = rounds[index], 0
    if position:
        before = rounds[members[position - 1]]
        if members[position - 1] not in round_.after:
            name = workload.sessions[session].name
            raise WorkloadError(f"session {name!r} is not closed-loop: TraceLab cannot hold it")
        held = min(before.input_tokens + before.output_tokens, round_.input_tokens)
        prefix = workload.tree.shared(before.output_branch, round_.branch, held)
    next_wait = rounds[members[position + 1]].at_s if position + 1 < len(members) else 0.0
    first = rounds[members[0]]
    return [
        workload.sessions[session].name,
        round((0.0 if first.after else first.at_s) * 1e3),
        position,
        prefix,
        round_.input_tokens - prefix,
        round_.output_tokens,
        round(next_wait * 1e3),
    ]


def _losses(workload: Workload) -> list[str]:
    waits = [len(round_.after) for round_ in workload.rounds]
    children = sum(session.parent is not None for session in workload.sessions)
    tree = workload.tree
    roots = {tree.path(round_.branch, 1)[0].branch for round_ in workload.rounds}
    losses = []
    if children:
        losses.append(f"parents of {children} child sessions")
    if any(count > 1 for count in waits):
        losses.append(f"{sum(count > 1 for count in waits)} waits for several rounds")
    if len(roots) < len(workload.sessions):
        losses.append("prefixes shared between sessions")
    if any(round_.priority for round_ in workload.rounds):
        losses.append("priorities")
    if any(round_.fair_class for round_ in workload.rounds):
        losses.append("classes")
    if any(round_.abort_after is not None for round_ in workload.rounds):
        losses.append("client aborts")
    return losses
