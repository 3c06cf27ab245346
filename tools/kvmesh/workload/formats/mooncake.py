"""Mooncake traces, plain and agentic: JSONL with lengths and the ids of 512-token blocks.

Plain rows (Mooncake, FAST'25) hold `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`; an id identifies a block and all blocks before it. Rows with one `session_id` are
closed-loop turns: a turn starts `delay` ms after the end of the previous one. Agentic rows add
`request_id`, `wait_for` (ids of requests that must have ended) and `tool_wait_ms`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.workload.analysis.sharing import link_outputs
from kvmesh.workload.errors import Problem, Repairs, TraceError
from kvmesh.workload.model import (
    Milliseconds,
    Priority,
    Round,
    Session,
    SomeTokens,
    Tokens,
    Workload,
)
from kvmesh.workload.ordering import topological_order
from kvmesh.workload.tree import ROOT, Tree

BLOCK_SIZE = 512


class MooncakeRow(Struct, kw_only=True, omit_defaults=True):
    """One line.

    `block_size`, `priority`, `fair_class`, `abort_after` and `parent_session_id` are extensions.
    """

    input_length: SomeTokens
    output_length: Tokens
    hash_ids: list[int]
    timestamp: Milliseconds | None = None
    request_id: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    delay: Milliseconds | None = None
    tool_wait_ms: Milliseconds | None = None
    wait_for: list[str] = []
    priority: Priority = 0
    fair_class: str = ""
    abort_after: SomeTokens | None = None
    block_size: SomeTokens = BLOCK_SIZE


ALIASES = {
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "created_time": "timestamp",
    "delay_ms": "delay",
}


def read(file: Path, repair: bool = False) -> tuple[Workload, Repairs]:
    """The workload of a trace, and the repairs made; raises TraceError or OSError."""
    repairs = Repairs(file, repair)
    rows = _rows(file, repairs)
    if not rows:
        raise TraceError(file, repairs.problems or [Problem(1, "no requests in this file", "")])
    _make_ids_unique(rows, repairs)
    _order(rows, repairs)
    workload = Assembler(repairs).workload(rows)
    repairs.check()
    return workload, repairs


def _rows(file: Path, repairs: Repairs) -> list[tuple[int, MooncakeRow]]:
    rows: list[tuple[int, MooncakeRow]] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = _parse(line)
            except msgspec.MsgspecError as error:
                repairs.note(number, str(error).replace("`$.", "`"), "dropped the line")
            else:
                rows.append((number, _match_hash_ids(number, row, repairs)))
    return rows


def _parse(line: bytes) -> MooncakeRow:
    fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    for alias, name in ALIASES.items():
        if alias in fields and name not in fields:
            fields[name] = fields.pop(alias)
    return msgspec.convert(fields, MooncakeRow)


def _match_hash_ids(number: int, row: MooncakeRow, repairs: Repairs) -> MooncakeRow:
    """Make hash ids and length agree: one id per started block."""
    expected = -(-row.input_length // row.block_size)
    found = len(row.hash_ids)
    if found == expected:
        return row
    reason = (
        f"{found} hash_ids for {row.input_length} tokens, "
        f"which are {expected} blocks of {row.block_size}"
    )
    if found > expected:
        repairs.note(number, reason, "dropped surplus hash_ids")
        row.hash_ids = row.hash_ids[:expected]
    else:
        repairs.note(number, reason, "shortened the prompt to its hash_ids")
        row.input_length = max(1, found * row.block_size)
    return row


def _make_ids_unique(rows: list[tuple[int, MooncakeRow]], repairs: Repairs) -> None:
    """Make request ids unique."""
    known: set[str] = set()
    for number, row in rows:
        if row.request_id is None:
            continue
        if row.request_id in known:
            reason = f"duplicate request id {row.request_id!r}"
            repairs.note(number, reason, "dropped the id")
            row.request_id = None
        else:
            known.add(row.request_id)


def _order(rows: list[tuple[int, MooncakeRow]], repairs: Repairs) -> None:
    """Sort rows by time; a row without a timestamp stays behind its session's previous row."""
    latest = 0.0
    disordered = False
    times: list[float] = []
    sessions: dict[str, float] = {}
    for number, row in rows:
        time = row.timestamp
        if time is None:
            time = sessions.get(row.session_id or "", latest)
        elif time < latest:
            reason = f"timestamp {time:g} ms is before {latest:g} ms of an earlier line"
            repairs.note(number, reason, "sorted by time")
            disordered = True
        latest = max(latest, time)
        if row.session_id:
            sessions[row.session_id] = time
        times.append(time)
    if disordered:
        rows[:] = [rows[index] for index in sorted(range(len(rows)), key=times.__getitem__)]


class TreeBuilder:
    """Grows a tree from block ids; an id identifies a block and all blocks before it."""

    def __init__(self, tree: Tree, block_size: int) -> None:
        self._tree = tree
        self._size = block_size
        self._known: dict[tuple[int, int] | int, tuple[int, int, int]] = {}
        self._tips: dict[int, int] = {}
        self.conflicts: list[int] = []

    def add(self, ids: Iterable[int]) -> int:
        """The branch of a prompt; ids seen before with another parent go to `conflicts`."""
        branch, before = ROOT, ROOT
        for depth, block in enumerate(ids):
            key: tuple[int, int] | int = block
            known = self._known.get(key)
            if known is not None and known[1:] != (depth, before):
                self.conflicts.append(block)
                key = (before, block)
                known = self._known.get(key)
            if known is None:
                branch = self._grow(branch, depth)
                self._known[key] = (branch, depth, before)
            else:
                branch = known[0]
            before = block
        return branch if branch != ROOT else self._tree.fork()

    def _grow(self, branch: int, depth: int) -> int:
        if branch == ROOT or self._tips[branch] != depth:
            branch = self._tree.fork(branch, depth * self._size)
        self._tips[branch] = depth + 1
        return branch


class Assembler:
    """Builds the workload from checked rows."""

    def __init__(self, repairs: Repairs) -> None:
        self._repairs = repairs
        self._tree = Tree()
        self._builders: dict[int, TreeBuilder] = {}
        self._sessions: dict[str, int] = {}
        self._session_list: list[Session] = []
        self._rounds: list[Round] = []
        self._round_of: dict[int, int] = {}

    def workload(self, rows: list[tuple[int, MooncakeRow]]) -> Workload:
        before = predecessors(rows, self._repairs)
        for index in topological_order(before, lambda index: self._note_cycle(rows[index])):
            number, row = rows[index]
            after = tuple(sorted(self._round_of[other] for other in before[index]))
            self._round_of[index] = len(self._rounds)
            self._add(number, row, after)
        workload = Workload(
            tree=self._tree,
            sessions=self._session_list,
            rounds=self._rounds,
            block_size=max(self._builders, default=1),
        )
        for members in workload.by_session():
            link_outputs(workload, members)
        return workload

    def _note_cycle(self, numbered: tuple[int, MooncakeRow]) -> None:
        number, row = numbered
        name = row.request_id or row.session_id
        self._repairs.note(number, f"cycle in wait_for through {name!r}", "dropped the wait")

    def _add(self, number: int, row: MooncakeRow, after: tuple[int, ...]) -> None:
        builder = self._builders.setdefault(row.block_size, TreeBuilder(self._tree, row.block_size))
        branch = builder.add(row.hash_ids)
        for block in builder.conflicts:
            self._repairs.note(
                number, f"hash id {block} follows another block elsewhere", "renamed"
            )
        builder.conflicts.clear()
        session = self._session(row)
        self._rounds.append(
            Round(
                session=session,
                branch=branch,
                output_branch=self._tree.fork(branch, row.input_length),
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                at_s=self._start(row, after),
                after=after,
                wait="tool" if row.tool_wait_ms else "",
                priority=row.priority,
                fair_class=row.fair_class,
                abort_after=row.abort_after,
            )
        )

    def _session(self, row: MooncakeRow) -> int:
        name = row.session_id
        if name is not None and name in self._sessions:
            return self._sessions[name]
        index = len(self._session_list)
        parent = self._sessions.get(row.parent_session_id or "")
        self._session_list.append(Session(name=name or f"r{index}", parent=parent))
        if name is not None:
            self._sessions[name] = index
        return index

    def _start(self, row: MooncakeRow, after: tuple[int, ...]) -> float:
        if after:
            return ((row.delay or 0.0) + (row.tool_wait_ms or 0.0)) / 1e3
        return (row.timestamp or 0.0) / 1e3


def predecessors(rows: list[tuple[int, MooncakeRow]], repairs: Repairs) -> list[set[int]]:
    """Indices of the rows that each row waits for: those in `wait_for`, or the previous turn."""
    named = {
        row.request_id: index for index, (_, row) in enumerate(rows) if row.request_id is not None
    }
    last: dict[str, int] = {}
    before: list[set[int]] = []
    for index, (number, row) in enumerate(rows):
        waits: set[int] = set()
        for name in row.wait_for:
            if name in named:
                waits.add(named[name])
            else:
                repairs.note(number, f"waits for unknown request {name!r}", "dropped the wait")
        session = row.session_id
        if session is not None:
            chained = row.delay is not None or row.timestamp is None
            if not row.wait_for and chained and session in last:
                waits.add(last[session])
            last[session] = index
        before.append(waits)
    return before
