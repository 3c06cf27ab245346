"""Sessions of coding agents as kv-cache-tester records them (Weka, AgentX): a JSON file each.

A file holds `requests` in order, with seconds since the start of the session (`t`), tokens (`in`,
`out`), seconds of the answer (`api_time`) and of the client before it (`think_time`), and ids of
full blocks of `block_size` tokens. An entry of type `subagent` holds the requests of a child.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import HUMAN, TOOL, Seconds, SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.recorded import follow
from kvmesh.workload.reading.rows import TraceRow, reason_of, record_of
from kvmesh.workload.reading.source import TraceFile

# Times are rounded down to seconds.
ROUNDING_MS = 1000.0
CHILD, COMPLETED = "subagent", "completed"


class WekaTimes(Struct, kw_only=True):
    """The times of an entry: all that tells how a corpus counts the times of subagents."""

    t: float
    type: str = "n"
    requests: list["WekaTimes"] = []


class WekaTimesFile(Struct, kw_only=True):
    requests: list[WekaTimes]


class WekaEntry(Struct, kw_only=True, rename={"input": "in", "output": "out"}):
    """A request, or a subagent with its requests."""

    t: float
    type: str = "n"
    input: Tokens = 0
    output: Tokens | None = None
    hash_ids: list[int] = []
    input_types: list[str] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    agent_id: str = ""
    subagent_type: str = ""
    status: str = COMPLETED
    requests: list["WekaEntry"] = []


class WekaFile(Struct, kw_only=True):
    block_size: SomeTokens
    requests: list[WekaEntry]
    id: str | int = ""
    hash_id_scope: Literal["local", "global"] = "local"


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The sessions in the files; raises TraceError or OSError."""
    reader = _Reader(files, options, repairs)
    for number, file in enumerate(files):
        repairs.file = file.path
        for line, record in file.records():
            try:
                session = record_of(record, WekaFile)
            except msgspec.MsgspecError as error:
                repairs.note(line, reason_of(error), "dropped the session")
            else:
                reader.add(session, number, line)
    if reader.empty:
        repairs.assume(f"left out {counted(reader.empty, 'session')} without requests")
    sessions = reader.sessions - reader.empty
    if sessions > 1:
        repairs.assume(
            f"{sessions:,} sessions start together: the format has no times between them"
        )
    return reader.assembly.trace(reader.rows)


def _relative(files: Sequence[TraceFile]) -> bool:
    """True if a subagent's requests count from its own start, not from the session's."""
    for file in files:
        for _, record in file.records():
            try:
                session = record_of(record, WekaTimesFile)
            except msgspec.MsgspecError:
                continue
            if any(map(_precedes_its_start, session.requests)):
                return True
    return False


def _precedes_its_start(entry: WekaTimes) -> bool:
    """True if a request of a subagent, or of one that it started, is before its entry."""
    return any(
        inner.t < entry.t - ROUNDING_MS / 1e3 or _precedes_its_start(inner)
        for inner in entry.requests
    )


class _Reader:
    def __init__(self, files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> None:
        self.assembly = Assembly(files, repairs)
        self.rows: list[TraceRow] = []
        self.sessions = self.empty = 0
        self._requests = 0
        self._files = files
        self._names: set[str] = set()
        self._repairs = repairs
        self._unit = options.milliseconds("s")
        self._relative = _relative(files)
        self._scope = self._size = 0
        self._line = (0, 0)

    def add(self, session: WekaFile, number: int, line: int) -> None:
        """Add the rows of a session; their ids end with it, so they are resolved at once."""
        self.sessions += 1
        self.empty += not session.requests
        self._line = (number, line)
        self._scope = self.sessions if session.hash_id_scope == "local" else 0
        self._size = session.block_size
        name = f"{session.id}" or self._files[number].path.name.partition(".")[0]
        if name in self._names:
            name = f"{name}-{self.sessions}"
        self._names.add(name)
        main = [self._row(entry, name) for entry in session.requests if entry.type != CHILD]
        follow(main, ROUNDING_MS)
        self.rows += main
        self._add_children(session.requests, name, main, 0.0)

    def _add_children(
        self, entries: list[WekaEntry], parent: str, main: list[TraceRow], begin: float
    ) -> None:
        """Add the subagents among the entries of `parent`, whose times count from `begin`."""
        for entry in entries:
            if entry.type == CHILD:
                start = begin + entry.t * self._unit if self._relative else 0.0
                self._add_child(entry, parent, main, start)

    def _add_child(self, entry: WekaEntry, parent: str, main: list[TraceRow], start: float) -> None:
        name = f"{parent}/{entry.agent_id or f'subagent-{entry.t:g}'}"
        rows = [self._row(inner, name) for inner in entry.requests if inner.type != CHILD]
        for row in rows:
            row.time, row.end = (row.time or 0.0) + start, (row.end or 0.0) + start
            row.parent, row.kind = parent, entry.subagent_type
        if rows:
            follow(rows, ROUNDING_MS)
            _join(rows, main, entry.status == COMPLETED)
        self.rows += rows
        self._add_children(entry.requests, name if rows else parent, rows or main, start)

    def _row(self, entry: WekaEntry, session: str) -> TraceRow:
        time = entry.t * self._unit
        if not entry.input:
            self._repairs.assume("requests without prompt tokens count as one token")
        tokens = max(entry.input, 1)
        found, blocks = len(entry.hash_ids), -(-tokens // self._size)
        if found not in (0, tokens // self._size, blocks):
            reason = (
                f"{found} hash_ids for {tokens} tokens, which are {blocks} blocks of {self._size}"
            )
            self._repairs.note(self._line[1], reason, "dropped surplus or missing hash_ids")
        ids = entry.hash_ids[:blocks]
        branch = self.assembly.builder(self._scope, self._size).add_contents(ids)
        self._requests += 1
        think = entry.think_time
        return TraceRow(
            line=self._line[1],
            file=self._line[0],
            input_length=tokens,
            output_length=entry.output,
            branch=branch,
            block_size=self._size,
            time=time,
            end=time + (entry.api_time or 0.0) * self._unit,
            delay=-1.0 if think is None else think * self._unit,
            request_id=str(self._requests),
            session=session,
            wait=TOOL if "tool_result" in entry.input_types else HUMAN,
        )


def _join(rows: list[TraceRow], main: list[TraceRow], completed: bool) -> None:
    """Start a child after its parent's request; the next one waits for a completed child."""
    first, end = rows[0], max(row.end or 0.0 for row in rows)
    begin = first.time or 0.0
    before = [row for row in main if (row.end or 0.0) <= begin + ROUNDING_MS]
    if before:
        spawner = max(before, key=lambda row: row.end or 0.0)
        first.wait_for = [spawner.request_id or ""]
        first.delay = max(0.0, begin - (spawner.end or 0.0))
        first.wait = TOOL
    for row in main:
        if completed and (row.time or 0.0) > begin and (row.time or 0.0) + ROUNDING_MS >= end:
            row.wait_for = [*row.wait_for, rows[-1].request_id or ""]
            row.delay = min(row.delay, max(0.0, (row.time or 0.0) - end))
            return
