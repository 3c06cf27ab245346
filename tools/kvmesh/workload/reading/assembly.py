"""Builds a workload from the rows of a trace."""

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path

from msgspec import Struct, structs

from kvmesh.runtime.quantities import counted
from kvmesh.workload.analysis.sharing import link_outputs
from kvmesh.workload.errors import Problem, Repairs, TraceError
from kvmesh.workload.model import LIMIT, Round, Session, Workload
from kvmesh.workload.ordering import ancestors, topological_order
from kvmesh.workload.reading.prefixes import SharedPrefixes, joined, separate, shared_prefixes
from kvmesh.workload.reading.rows import OUTPUT_TOKENS, TraceRow, note_outputs
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import note_doubtful_units
from kvmesh.workload.reading.tree_builder import TreeBuilder
from kvmesh.workload.tree import Tree

RENAME_HINT = "--repair reads an id behind other blocks as another block"
UNIT_HINT = "--time-unit names the unit of the times"
MOST_MS = LIMIT * 1e3
DONE = TraceRow(line=0, input_length=1, output_length=0)


class ReadTrace(Struct, kw_only=True):
    """A workload, and the start of each round in seconds, as recorded or else as planned."""

    workload: Workload
    starts: list[float]


class Assembly:
    """Builds the workload of one trace; all times count from its earliest."""

    def __init__(self, files: Sequence[TraceFile], repairs: Repairs) -> None:
        self.tree = Tree()
        self.by_content = False
        self._origin = 0.0
        self._paths = [file.path for file in files]
        self._repairs = repairs
        self._builders: dict[tuple[int, int], TreeBuilder] = {}
        self._prefixes: dict[tuple[int, int], SharedPrefixes] = {}
        self._sessions: dict[str, int] = {}
        self._first: dict[str, TraceRow] = {}
        self._parents: dict[str, str | None] = {}
        self._session_list: list[Session] = []
        self._last: dict[int, Round] = {}
        self._rounds: list[Round] = []
        self._starts: list[float] = []
        self._round_of: dict[int, int] = {}

    def builder(self, scope: int, block_size: int) -> TreeBuilder:
        """The builder of the namespace `scope` of block ids."""
        key = (scope, block_size)
        if key not in self._builders:
            self._builders[key] = TreeBuilder(self.tree, block_size)
        return self._builders[key]

    def trace(self, rows: list[TraceRow], ordered: bool = False, found: int = 0) -> ReadTrace:
        """The trace of checked rows; raises TraceError.

        A row of an `ordered` trace must not be earlier than the one before it. `found` is the
        number of rows in the files, if some were dropped.
        """
        found = found or len(rows)
        self._assume_outputs(rows)
        self._normalise_times(rows)
        self._drop_impossible(rows)
        if not rows:
            self._repairs.check(found)
            nothing = Problem(1, "no requests in this file", "", self._path(0))
            raise TraceError(self._path(0), self._repairs.problems or [nothing])
        self._make_ids_unique(rows)
        self._order(rows, ordered)
        self._find_parents(rows)
        grows = any(row.grows for row in rows)
        self._assemble(rows)
        self._repairs.check(found)
        block_size = max((size for _, size in [*self._builders, *self._prefixes]), default=1)
        workload = Workload(
            tree=self.tree,
            sessions=self._session_list,
            rounds=self._rounds,
            block_size=block_size,
        )
        if not grows:
            link_outputs(workload)
        return ReadTrace(workload=workload, starts=self._starts)

    def _path(self, file: int) -> Path:
        return self._paths[file]

    def _note(self, row: TraceRow, reason: str, repair: str, hint: str = "") -> None:
        self._repairs.file = self._path(row.file)
        self._repairs.note(row.line, reason, repair, hint)

    def _assume_outputs(self, rows: list[TraceRow]) -> None:
        """Set the lengths of outputs that the trace does not state."""
        missing = [row for row in rows if row.output_length is None]
        for row in missing:
            row.output_length = OUTPUT_TOKENS
        note_outputs(len(missing), self._repairs)

    def _normalise_times(self, rows: list[TraceRow]) -> None:
        """Make the earliest time 0."""
        times = [row.time for row in rows if row.time is not None and isfinite(row.time)]
        note_doubtful_units(rows, times, self._repairs)
        self._origin = origin = min(times, default=0.0)
        for row in rows:
            if row.time is not None:
                row.time -= origin

    def _drop_impossible(self, rows: list[TraceRow]) -> None:
        """Drop rows with lengths, times or waits out of range, which not all readers check."""
        kept: list[TraceRow] = []
        for row in rows:
            if not (row.time or 0.0) <= MOST_MS:
                reason = (
                    f"`float` <= {MOST_MS:g} ms after the first request expected, "
                    f"got {row.time:g} - at `timestamp`"
                )
                self._note(row, reason, "dropped the line", UNIT_HINT)
            elif not 0.0 <= row.delay <= MOST_MS:
                reason = f"a wait between 0 and {MOST_MS:g} ms expected, got {row.delay:g}"
                self._note(row, reason, "dropped the line")
            elif not (row.input_length <= LIMIT and 0 <= (row.output_length or 0) <= LIMIT):
                reason = (
                    f"lengths between 0 and {LIMIT:,} tokens expected, "
                    f"got {row.input_length} and {row.output_length}"
                )
                self._note(row, reason, "dropped the line")
            else:
                kept.append(row)
        rows[:] = kept

    def _make_ids_unique(self, rows: list[TraceRow]) -> None:
        known: set[str] = set()
        for row in rows:
            if row.request_id is None:
                continue
            if row.request_id in known:
                self._note(row, f"duplicate request id {row.request_id!r}", "dropped the id")
                row.request_id = None
            else:
                known.add(row.request_id)

    def _order(self, rows: list[TraceRow], ordered: bool) -> None:
        """Sort rows by time; a row without a time stays behind its session's previous row."""
        latest, file = 0.0, 0
        disordered = False
        loose = timed = 0
        times: list[float] = []
        sessions: dict[str, float] = {}
        for row in rows:
            time = row.time
            if row.file != file:
                latest, file, disordered = 0.0, row.file, True
            timed += time is not None
            if time is None:
                follows = row.chained and (row.session or "") in sessions
                loose += not (row.wait_for or follows)
                time = sessions.get(row.session or "", latest)
            elif time < latest:
                if ordered:
                    reason = (
                        f"timestamp {time + self._origin:g} ms is before "
                        f"{latest + self._origin:g} ms of an earlier line"
                    )
                    self._note(row, reason, "sorted by time")
                disordered = True
            latest = max(latest, time)
            if row.session:
                sessions[row.session] = time
            times.append(time)
        self._note_loose(loose, timed, bool(sessions))
        if disordered:
            rows[:] = [rows[index] for index in sorted(range(len(rows)), key=times.__getitem__)]

    def _note_loose(self, loose: int, timed: int, sessions: bool) -> None:
        """State when the requests start that have neither a time nor a predecessor."""
        if loose and timed:
            self._repairs.assume(
                f"{counted(loose, 'request')} without a time: at the time of the first"
            )
        elif loose > 1:
            which = "sessions" if sessions else "requests"
            self._repairs.assume(f"all {which} start at once: the file has no times")

    def _find_parents(self, rows: list[TraceRow]) -> None:
        """Collect the sessions that are children, whose parents may begin later; drop cycles."""
        if not any(row.parent for row in rows):
            return
        first: dict[str, TraceRow] = {}
        for row in rows:
            if row.session is not None:
                first.setdefault(row.session, row)
        settled: set[str] = set()
        for name in first:
            path: dict[str, None] = {}
            at: str | None = name
            while at in first and at not in settled and at not in path:
                path[at] = None
                at = first[at].parent
            if at in path:
                row = first[at]
                self._note(row, f"cycle of parent sessions through {at!r}", "dropped the parent")
                row.parent = None
            settled.update(path)
        unknown = sum(bool(row.parent) and row.parent not in first for row in first.values())
        if unknown:
            self._repairs.assume(
                f"{counted(unknown, 'session')} of unknown parents: they are read as roots"
            )
        self._first = first
        self._parents = {name: row.parent for name, row in first.items()}

    def _assemble(self, rows: list[TraceRow]) -> None:
        """Add a round per row; rows are left behind empty, as both would be in memory."""
        before = self._predecessors(rows)
        if not any(before):
            self._prepare_prefixes(rows, range(len(rows)))
            for index, row in enumerate(rows):
                self._add(row, ())
                rows[index] = DONE
            return
        order = list(topological_order(before, lambda index: self._note_cycle(rows[index])))
        self._prepare_prefixes(rows, order)
        for index in order:
            after = tuple(sorted(self._round_of[other] for other in before[index]))
            self._round_of[index] = len(self._rounds)
            self._add(rows[index], after)
            rows[index] = DONE

    def _prepare_prefixes(self, rows: list[TraceRow], order: Iterable[int]) -> None:
        """Find the prefixes that prompts share; those with conflicting ids are added one by one."""
        if self.by_content or self._builders or any(row.grows for row in rows):
            return
        groups: dict[tuple[int, int], list[TraceRow]] = {}
        for index in order:
            row = rows[index]
            if row.ids and row.branch is None:
                groups.setdefault((row.scope, row.block_size), []).append(row)
        for key, members in groups.items():
            together = joined(members)
            if together is None:
                continue
            flat, lengths = together
            found = shared_prefixes(self.tree, key[1], flat, lengths)
            if found:
                self._prefixes[key] = found
            else:
                separate(members, flat)

    def _predecessors(self, rows: list[TraceRow]) -> list[set[int]]:
        """Indices of the rows that each row waits for: those it names, or the previous turn."""
        if not any(row.wait_for or (row.session and row.chained) for row in rows):
            return []
        named = {row.request_id: i for i, row in enumerate(rows) if row.request_id is not None}
        last: dict[str, int] = {}
        before: list[set[int]] = []
        for index, row in enumerate(rows):
            waits: set[int] = set()
            for name in row.wait_for:
                if name in named:
                    waits.add(named[name])
                else:
                    self._note(row, f"waits for unknown request {name!r}", "dropped the wait")
            if row.session is not None:
                if not row.wait_for and row.chained and row.session in last:
                    waits.add(last[row.session])
                last[row.session] = index
            before.append(waits)
        return before

    def _note_cycle(self, row: TraceRow) -> None:
        name = row.request_id or row.session
        self._note(row, f"cycle in wait_for through {name!r}", "dropped the wait")

    def _add(self, row: TraceRow, after: tuple[int, ...]) -> None:
        session = self._session(row)
        branch, tokens = self._prompt(row, session)
        round_ = Round(
            session=session,
            branch=branch,
            output_branch=branch if row.grows else self.tree.fork(branch, tokens),
            input_tokens=tokens,
            output_tokens=row.output_length or 0,
            at_s=(row.delay if after else row.time or 0.0) / 1e3,
            after=after,
            wait=row.wait if after else "",
            priority=row.priority,
            fair_class=row.fair_class,
            abort_after=row.abort_after,
        )
        begin = max((self._starts[index] for index in after), default=0.0) + round_.at_s
        self._starts.append(begin if row.time is None else row.time / 1e3)
        self._last[session] = round_
        self._rounds.append(round_)

    def _prompt(self, row: TraceRow, session: int) -> tuple[int, int]:
        """(branch, tokens) of a row's prompt."""
        last = self._last.get(session)
        if row.grows and last is not None:
            held = last.input_tokens + last.output_tokens
            return last.output_branch, held + row.input_length
        if row.branch is not None:
            return row.branch, row.input_length
        if not row.ids:
            return self.tree.fork(), row.input_length
        prefixes = self._prefixes.get((row.scope, row.block_size))
        if prefixes is not None:
            return prefixes.add(len(row.ids)), row.input_length
        builder = self.builder(row.scope, row.block_size)
        if self.by_content:
            return builder.add_contents(row.ids), row.input_length
        branch = builder.add(row.ids)
        row.ids = ()  # the tree holds them now
        for block in builder.conflicts:
            reason = f"hash id {block} follows another block elsewhere"
            self._note(row, reason, "renamed", RENAME_HINT)
        builder.conflicts.clear()
        return branch, row.input_length

    def _session(self, row: TraceRow) -> int:
        name = row.session
        if name is not None and name in self._sessions:
            index = self._sessions[name]
        else:
            index = self._new_session(row)
        if row.ends:
            self._session_list[index] = structs.replace(self._session_list[index], ends=True)
        return index

    def _new_session(self, row: TraceRow) -> int:
        """Add the session of its first row behind that of its parent, which may begin later."""
        for name in ancestors(row.parent, self._parents, self._sessions):
            self._append_session(self._first[name])
        return self._append_session(row)

    def _append_session(self, row: TraceRow) -> int:
        index = len(self._session_list)
        parent = self._sessions.get(row.parent or "")
        name = row.session or f"r{index}"
        self._session_list.append(Session(name=name, kind=row.kind, parent=parent))
        if row.session is not None:
            self._sessions[row.session] = index
        return index
