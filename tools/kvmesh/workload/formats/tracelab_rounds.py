"""TraceLab's corpus: JSONL, one recorded round of a coding agent per line.

A row holds `session_id`, `round_index`, the tokens of its prompt (`input_tokens_total`), how many
of them were cached (`prefix_tokens`), `output_tokens`, `timing_events` with times in ISO 8601, and
the `tools` that the answer called.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import HUMAN, TOOL, SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.recorded import follow
from kvmesh.workload.reading.rows import TraceRow, decoded, parsed, reason_of
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import rescale_unix_times
from kvmesh.workload.tree import Tree

INPUT_EVENTS = ("user_message", "tool_result")


class TracelabEvent(Struct, kw_only=True):
    event_type: str
    timestamp: float | str = ""


class TracelabTool(Struct, kw_only=True):
    tool_name: str = TOOL
    result_at: str | None = None


class TracelabRound(Struct, kw_only=True):
    session_id: str
    round_index: int
    input_tokens_total: SomeTokens
    prefix_tokens: Tokens = 0
    output_tokens: Tokens | None = None
    provider: str = ""
    project: str = ""
    model: str = ""
    timing_events: list[TracelabEvent] = []
    tools: list[TracelabTool] = []

    def times(self, options: ReadOptions) -> tuple[float, float] | None:
        """Unix milliseconds of the request (its last input) and of its last output, if known."""
        inputs = [e.timestamp for e in self.timing_events if e.event_type in INPUT_EVENTS]
        outputs = [e.timestamp for e in self.timing_events if e.event_type not in INPUT_EVENTS]
        begins = [options.moment(time, "ms") for time in inputs if time != ""]
        ends = [options.moment(time, "ms") for time in outputs if time != ""]
        if not begins and not ends:
            return None
        begin = max(begins) if begins else min(ends)
        return begin, max([begin, *ends])

    def wait(self, before: "TracelabRound | None") -> str:
        """The client's activity before this round: the last tool to end, or a human."""
        kinds = [e.event_type for e in self.timing_events]
        if "tool_result" not in kinds:
            return HUMAN
        tools = before.tools if before is not None else []
        return max(tools, key=lambda tool: tool.result_at or "").tool_name if tools else TOOL


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The trace in the files; raises TraceError or OSError."""
    sessions: dict[str, list[tuple[TraceRow, TracelabRound]]] = {}
    found = 0
    for number, file in enumerate(files):
        repairs.file = file.path
        for line, record in file.records():
            found += 1
            try:
                one = parsed(decoded(record), TracelabRound)
                row = _row(one, options, number, line, found)
            except (msgspec.MsgspecError, ValueError) as error:
                repairs.note(line, reason_of(error), "dropped the line")
                continue
            sessions.setdefault(one.session_id, []).append((row, one))
    every = [row for members in sessions.values() for row, _ in members]
    rescale_unix_times(every, options, "ms", repairs)
    assembly = Assembly(files, repairs)
    heads = _Heads(assembly.tree)
    twice = sum(len(m) - len({one.round_index for _, one in m}) for m in sessions.values())
    if twice:
        repairs.assume(f"{counted(twice, 'round')} with the index of another one of their session")
    absent = sum(_absent({one.round_index for _, one in m}) for m in sessions.values())
    if absent:
        repairs.assume(f"{counted(absent, 'round')} missing between others of their session")
    over = sum(one.prefix_tokens > row.input_length for m in sessions.values() for row, one in m)
    if over:
        repairs.assume(f"{counted(over, 'round')} with more cached tokens than prompt tokens")
    for members in sessions.values():
        members.sort(key=lambda pair: (pair[0].time or 0.0, pair[1].round_index))
        _grow(members, heads)
        follow([row for row, _ in members])
    if heads.tokens:
        repairs.assume(
            f"first rounds were recorded with {heads.tokens:,} cached prompt tokens: sessions of "
            "one provider, model and project are assumed to share them"
        )
    rows = [row for members in sessions.values() for row, _ in members]
    return assembly.trace(rows, found=found)


def _row(one: TracelabRound, options: ReadOptions, file: int, line: int, number: int) -> TraceRow:
    times = one.times(options)
    if times is None:
        raise ValueError("no timestamp in `timing_events`")
    return TraceRow(
        line=line,
        file=file,
        input_length=one.input_tokens_total,
        output_length=one.output_tokens,
        time=times[0],
        end=times[1],
        delay=-1.0,
        request_id=str(number),
        session=one.session_id,
        kind=one.provider,
    )


def _absent(indices: set[int]) -> int:
    return max(indices) - min(indices) + 1 - len(indices)


class _Heads:
    """The start of the prompts of sessions that cached each other's: one branch per group."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.tokens = 0
        self._branches: dict[tuple[str, str, str], int] = {}

    def branch(self, one: TracelabRound) -> int:
        """A new branch behind the cached tokens of a session's first round."""
        cached = min(one.prefix_tokens, one.input_tokens_total)
        if not cached:
            return self.tree.fork()
        self.tokens += cached
        group = (one.provider, one.model, one.project)
        if group not in self._branches:
            self._branches[group] = self.tree.fork()
        return self.tree.fork(self._branches[group], cached)


def _grow(members: list[tuple[TraceRow, TracelabRound]], heads: _Heads) -> None:
    """Set the branches of a session: each round keeps `prefix_tokens` of the context before it."""
    branch, held = -1, 0
    before: TracelabRound | None = None
    for row, one in members:
        prefix = min(one.prefix_tokens, one.input_tokens_total)
        if before is None:
            branch = heads.branch(one)
        elif prefix < held:
            branch = heads.tree.fork(branch, prefix)
        row.branch, row.wait = branch, one.wait(before)
        held = one.input_tokens_total
        before = one
