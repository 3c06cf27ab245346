"""A session as a timeline for ui.perfetto.dev (Chrome trace event format, JSON object form)."""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvmesh.cli.session_trace.turns import SessionTurn

US = 1e6
FIRST_WORKER = 1000  # process number; sessions have smaller ones


class _Lanes:
    """Rows of one group, such that the slices of a row do not overlap."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def of(self, start: float, end: float) -> int:
        """The first row that is free from `start` on, counted from 1."""
        for index, until in enumerate(self._ends):
            if until <= start:
                self._ends[index] = end
                return index + 1
        self._ends.append(end)
        return len(self._ends)


class _Timeline:
    def __init__(self, origin: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._origin = origin
        self._groups: dict[tuple[str, str], tuple[int, _Lanes]] = {}

    def group(self, kind: str, name: str) -> tuple[int, _Lanes]:
        """The process number and rows of a session or worker; named when first seen."""
        found = self._groups.get((kind, name))
        if found is None:
            count = sum(each == kind for each, _ in self._groups)
            number = count + (FIRST_WORKER if kind == "worker" else 1)
            found = self._groups[kind, name] = number, _Lanes()
            args = {"name": f"{kind} {name}"}
            self.events.append({"ph": "M", "name": "process_name", "pid": number, "args": args})
        return found

    def slice(
        self, where: tuple[int, int], name: str, start: float, end: float, **args: Any
    ) -> None:
        if end <= start:
            return
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "request",
                "pid": where[0],
                "tid": where[1],
                "ts": round((start - self._origin) * US, 1),
                "dur": round((end - start) * US, 1),
                "args": args,
            }
        )


def perfetto_timeline(turns: Iterable[SessionTurn]) -> bytes:
    """A process per session, with its turns, their phases and pauses; and one per worker."""
    listed = sorted(turns, key=lambda turn: turn.start)
    origin = min((turn.start for turn in listed), default=0.0)
    timeline = _Timeline(origin)
    for turn in listed:
        _add_turn(timeline, turn)
        _add_work(timeline, turn)
    other = {"origin_unix_s": origin}
    return msgspec.json.encode(
        {"traceEvents": timeline.events, "displayTimeUnit": "ms", "otherData": other}
    )


def _add_turn(timeline: _Timeline, turn: SessionTurn) -> None:
    number, lanes = timeline.group("session", turn.session)
    begins = turn.start if turn.after is None else turn.after
    where = number, lanes.of(begins, turn.end)
    outcome = turn.round.outcome
    if turn.after is not None:
        timeline.slice(where, f"waits for {turn.waits_for}", turn.after, turn.start)
    timeline.slice(
        where,
        f"turn {turn.number}",
        turn.start,
        turn.end,
        request=turn.request,
        model=turn.decision.model,
        prompt_tokens=turn.decision.tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        worker=turn.worker,
        policy=turn.decision.policy,
        finish=outcome.finish,
    )
    computed = turn.end if turn.first_token is None else turn.first_token
    timeline.slice(where, "prepare", turn.start, turn.routed)
    timeline.slice(where, "queue", turn.routed, turn.placed)
    timeline.slice(where, "prefill", turn.placed, computed)
    timeline.slice(where, "decode", computed, turn.end)


def _add_work(timeline: _Timeline, turn: SessionTurn) -> None:
    """The phases of a turn on the workers that ran them."""
    computed = turn.end if turn.first_token is None else turn.first_token
    name = f"{turn.session} {turn.number}"
    phases = [
        (turn.prefill_worker, "prefill", turn.placed, computed),
        (turn.worker, "decode", computed, turn.end),
    ]
    for worker, phase, start, end in phases:
        number, lanes = timeline.group("worker", worker)
        timeline.slice((number, lanes.of(start, end)), f"{phase} {name}", start, end)
