"""Texts and messages: conversations, trajectories of agents, and the data sets of load generators.

A record is one request (`input` and `output` of LMCache's agent traces, AIPerf's `text_input`,
`prompt` of GuideLLM and `vllm bench`), or a conversation in which each answer is a request
(ShareGPT's `conversations`, messages that end with an answer, SWE-agent's trajectories). Lengths
are estimates: a token is four bytes of text.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from kvmesh.hashing import TOKEN_BYTES, block_hashes
from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.options import ReadOptions, TimeUnit, date
from kvmesh.workload.reading.rows import TraceRow, decoded, packed, reason_of
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.text_records import CONVERSATIONS, TextRequest, requests_of
from kvmesh.workload.reading.turns import apply_turns

BLOCK_SIZE = 16
# Unix times from 2001 on, by their unit.
UNIX: dict[TimeUnit, float] = {"ns": 1e17, "us": 1e14, "ms": 1e11, "s": 1e8}


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The requests in the files; raises TraceError or OSError."""
    reader = _Reader(options, repairs)
    for number, file in enumerate(files):
        repairs.file = file.path
        for line, record in file.records() if file.is_json else file.table():
            reader.add(number, line, record)
    reader.report()
    apply_turns(reader.additions, options, repairs)
    return Assembly(files, repairs).trace(reader.rows, found=reader.found)


class _Reader:
    """Collects the requests of all records, and counts what they leave out."""

    def __init__(self, options: ReadOptions, repairs: Repairs) -> None:
        self.rows: list[TraceRow] = []
        self.additions: list[TraceRow] = []
        self.found = 0
        self._options = options
        self._repairs = repairs
        self._numbers = count(1)
        self._conversations: set[str | None] = set()
        self._units: dict[int, TimeUnit] = {}  # of files, by the first time in them
        self._empty = 0

    def add(self, file: int, line: int, record: bytes | str | dict[str, Any]) -> None:
        self.found += 1
        try:
            requests = self._requests(decoded(record))
            for request in requests:
                self._add(request, file, line)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            self._repairs.note(line, reason_of(error), "dropped the line")

    def _requests(self, record: dict[str, Any]) -> list[TextRequest]:
        """The requests of a record; those of a conversation are a session of their own."""
        number = next(self._numbers)
        if any(record.get(name) == [] for name in CONVERSATIONS):
            self._empty += 1
            return []
        requests = list(requests_of(record, f"conversation-{number}"))
        if not requests:
            raise msgspec.ValidationError("no text, messages or answer in this record")
        if len(requests) > 1:
            name = requests[0].session
            for request in requests:
                request.session = f"{name}-{number}" if name in self._conversations else name
            self._conversations.add(name)
        return requests

    def report(self) -> None:
        """State the assumptions about what the records leave out."""
        assume = self._repairs.assume
        assume("lengths are estimates: a token is 4 bytes of text, and a template adds none")
        if self._empty:
            assume(f"left out {counted(self._empty, 'conversation')} without a message")
        for unit in dict.fromkeys(self._units.values()):
            assume(f"times are read as {unit} (--time-unit)")

    def _add(self, request: TextRequest, file: int, line: int) -> None:
        output = request.output_tokens
        if output is None and request.output is not None:
            output = _tokens(request.output)
        timed = request.time is not None
        row = TraceRow(
            line=line,
            file=file,
            input_length=max(1, _tokens(request.prompt)),
            output_length=output,
            ids=packed(_block_ids(request.prompt)),
            block_size=BLOCK_SIZE,
            time=self._time(request, file) if timed else None,
            session=request.session,
            chained=not timed or request.delay is not None,
            delay=self._delay(request),
            grows=request.grows,
            wait=request.wait,
        )
        self.rows.append(row)
        if request.adds:
            self.additions.append(row)

    def _time(self, request: TextRequest, file: int) -> float:
        try:
            time = float(request.time or 0.0)
        except ValueError:
            return date(str(request.time))
        if file not in self._units:
            fitting = [unit for unit, least in UNIX.items() if time >= least]
            self._units[file] = self._options.time_unit or [*fitting, request.unit][0]
        return time * self._options.milliseconds(self._units[file])

    def _delay(self, request: TextRequest) -> float:
        """Milliseconds before the request, which only the field `delay` counts in an open unit."""
        delay = request.delay or 0.0
        return delay * (self._options.milliseconds(request.delay_unit) if delay else 0.0)


def _tokens(text: bytes) -> int:
    return -(-len(text) // TOKEN_BYTES)


def _block_ids(text: bytes) -> list[int]:
    """Chained hashes of the full blocks of a text."""
    size = BLOCK_SIZE * TOKEN_BYTES
    _, chained = block_hashes(text[: len(text) // size * size], BLOCK_SIZE, 0)
    hashes: list[int] = memoryview(chained).cast("Q").tolist()
    return hashes
