"""Captures a live mesh's routing decisions and outcomes as a workload.

A capture reads lengths, block hashes, sessions and times only. These subjects never carry text, and
salted hashes do not reveal prompts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from math import inf

import msgspec
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Decision, MessageDecoder, Outcome, RouteEvent, is_outcome
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.hashing import HASH_BYTES
from kvmesh.workload.analysis.sharing import link_outputs
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.model import Round, Session, Workload, wait_of
from kvmesh.workload.ordering import ancestors
from kvmesh.workload.reading.tree_builder import TreeBuilder
from kvmesh.workload.tree import Tree

_events: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)


class CaptureError(WorkloadError):
    """No finished requests, undecodable decisions, or decisions of several block sizes."""


class CapturedRound(Struct, frozen=True, kw_only=True):
    """A finished request; `arrival` and `end` in Unix seconds."""

    decision: Decision
    outcome: Outcome
    arrival: float
    end: float


class Recorder:
    """Pairs decisions with outcomes; a migrated request counts from its last placement."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._pending: dict[str, Decision] = {}
        self._rounds: dict[str, CapturedRound] = {}
        self._unreadable = 0

    @property
    def unfinished(self) -> int:
        return len(self._pending)

    @property
    def rounds(self) -> list[CapturedRound]:
        """Finished requests by arrival."""
        return sorted(self._rounds.values(), key=lambda round_: round_.arrival)

    def read(self, data: bytes) -> None:
        """Add an encoded decision or outcome."""
        try:
            self.add(_events.decode(data))
        except msgspec.MsgspecError:
            self._unreadable += 1

    def check(self) -> None:
        """Raise CaptureError if anything that was read could not be decoded."""
        if self._unreadable:
            raise CaptureError(f"cannot decode {self._unreadable} decisions (of another version?)")

    def add(self, event: RouteEvent) -> None:
        if isinstance(event, Decision):
            if self._model in (None, event.model):
                self._pending[event.request] = event
            return
        decision = self._pending.pop(event.request, None)
        if decision is not None:
            self._rounds[event.request] = CapturedRound(
                decision=decision,
                outcome=event,
                arrival=decision.time - decision.wait_s,
                end=event.time,
            )


def fitting_block_size(captured: list[CapturedRound]) -> int:
    """The block size with which each prompt has as many full blocks as hashes.

    Among several such sizes: the largest power of two, else the largest. Raises CaptureError.
    """
    low, high = 1, 1 << 16
    for each in captured:
        count, tokens = len(each.decision.sequence_hashes) // HASH_BYTES, each.decision.tokens
        low = max(low, tokens // (count + 1) + 1)
        if count:
            high = min(high, tokens // count)
    if low > high:
        raise CaptureError("the decisions have several block sizes; choose one with --model")
    power = 1 << (high.bit_length() - 1)
    return power if power >= low else high


def assemble(captured: list[CapturedRound]) -> Workload:
    """The workload of captured requests; the first arrival is time 0. Raises CaptureError.

    A round that arrived after the end of its session's previous round waits for that one; the
    others start at their arrival time.
    """
    if not captured:
        raise CaptureError("no finished requests in this window")
    size = fitting_block_size(captured)
    writer = _Writer(captured, size)
    for each in captured:
        writer.add(each)
    workload = Workload(
        tree=writer.tree, sessions=writer.sessions, rounds=writer.rounds, block_size=size
    )
    link_outputs(workload)
    return workload


class _Writer:
    def __init__(self, captured: list[CapturedRound], block_size: int) -> None:
        self.tree = Tree()
        self.sessions: list[Session] = []
        self.rounds: list[Round] = []
        self._origin = captured[0].arrival
        self._first: dict[str, CapturedRound] = {}
        for each in captured:
            if each.decision.hints.session is not None:
                self._first.setdefault(each.decision.hints.session, each)
        parents = {name: each.decision.hints.parent_session for name, each in self._first.items()}
        self._parents = parents
        self._builder = TreeBuilder(self.tree, block_size)
        self._known: dict[str, int] = {}
        self._last: dict[int, tuple[int, CapturedRound]] = {}

    def add(self, captured: CapturedRound) -> None:
        decision, outcome = captured.decision, captured.outcome
        session = self._session(captured)
        if decision.hints.session_final:
            self.sessions[session] = msgspec.structs.replace(self.sessions[session], ends=True)
        hashes = memoryview(decision.sequence_hashes).cast("Q").tolist()
        branch = self._builder.add(hashes)
        before = self._last.get(session)
        self._last[session] = (len(self.rounds), captured)
        tokens = max(1, decision.tokens)
        round_ = Round(
            session=session,
            branch=branch,
            output_branch=self.tree.fork(branch, tokens),
            input_tokens=tokens,
            output_tokens=outcome.output_tokens,
            at_s=captured.arrival - self._origin,
            osl=decision.hints.osl or 0,
            priority=decision.hints.priority,
            fair_class=decision.hints.fair_class or "",
            abort_after=max(1, outcome.output_tokens) if outcome.finish == "cancelled" else None,
        )
        if before is not None and before[1].end <= captured.arrival:
            round_ = _following(round_, before[0], captured.arrival - before[1].end, before[1])
        self.rounds.append(round_)

    def _session(self, captured: CapturedRound) -> int:
        """The session of a request behind its parent, which may begin later."""
        name = captured.decision.hints.session
        if name is not None and name in self._known:
            return self._known[name]
        above = captured.decision.hints.parent_session
        for each in ancestors(above, self._parents, self._known):
            if each != name:
                self._append_session(self._first[each])
        return self._append_session(captured)

    def _append_session(self, captured: CapturedRound) -> int:
        hints = captured.decision.hints
        index = len(self.sessions)
        parent = self._known.get(hints.parent_session or "")
        name = hints.session or captured.decision.request
        self.sessions.append(Session(name=name, kind=captured.outcome.agent, parent=parent))
        if hints.session is not None:
            self._known[hints.session] = index
        return index


def _following(round_: Round, index: int, wait_s: float, before: CapturedRound) -> Round:
    """A round that starts `wait_s` seconds after its session's round `index`, named as then."""
    wait, wait_class = wait_of(before.outcome.waits_for)
    return msgspec.structs.replace(
        round_, at_s=wait_s, after=(index,), wait=wait, wait_class=wait_class
    )


@dataclass
class CaptureEnd:
    """The end of a capture: a Unix time, or the most requests or bytes that it reads."""

    until: float = inf
    most_requests: float = inf
    most_bytes: float = inf
    requests: int = 0
    bytes: int = 0

    @property
    def cut(self) -> bool:
        """True if a bound has ended the capture before its time."""
        return self.requests >= self.most_requests or self.bytes >= self.most_bytes

    def reached(self, message: StreamMessage) -> bool:
        """True if a message is past the end; otherwise count it."""
        if self.cut or message.time > self.until:
            return True
        self.requests += is_outcome(message.data)
        self.bytes += len(message.data)
        return False


async def capture(
    bus: Bus,
    since: datetime,
    model: str | None,
    timeout: float = 60.0,
    *,
    end: CaptureEnd | None = None,
) -> Recorder:
    """Read the decisions and outcomes from `since` to `end`, or until now. Raises CaptureError."""
    recorder = Recorder(model)
    await read_routes(bus, since, model, recorder.read, end or CaptureEnd(), timeout)
    recorder.check()
    return recorder


async def read_routes(
    bus: Bus,
    since: datetime,
    model: str | None,
    handle: Callable[[bytes], None],
    end: CaptureEnd,
    timeout: float = 60.0,
) -> None:
    """Pass the decisions and outcomes from `since` to `end` to `handle`, as they are stored.

    Raises CaptureError.
    """
    ended = asyncio.Event()

    def on_message(message: StreamMessage) -> None:
        if not ended.is_set():
            if end.reached(message):
                ended.set()
            else:
                handle(message.data)

    subjects = bus.subjects
    subject = subjects.route(model) if model else subjects.route_all
    reader = StreamReader(bus, subjects.route_stream, subject, on_message, Start(time=since))
    await reader.open()
    waits = [asyncio.create_task(event.wait()) for event in (reader.caught_up, ended)]
    try:
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(waits, timeout=timeout, return_when=first)
        if not done:
            raise CaptureError(f"reading the decision stream took more than {timeout:g} s")
    finally:
        for wait in waits:
            wait.cancel()
        await reader.close()
