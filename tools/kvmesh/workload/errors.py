"""Errors of workloads; defects of traces and their repairs."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from kvmesh.runtime.quantities import counted

SHOWN = 10
_PARTICULARS = re.compile(r"'[^']*'|[-+]?\d[\d,.]*(?:e[-+]?\d+)?")


class Problem(NamedTuple):
    """One defect: its line (from 1), the reason, and the repair that `--repair` makes.

    `file` holds the line, if it is one of several files; `hint` is the way out.
    """

    line: int
    reason: str
    repair: str
    file: Path | None = None
    hint: str = ""

    @property
    def cause(self) -> str:
        """The reason without the numbers and names of this line."""
        return _PARTICULARS.sub("…", self.reason)


class WorkloadError(Exception):
    """Base class of errors in workloads, traces and profiles."""


class TraceError(WorkloadError):
    """A trace with defects that cannot be repaired, or without `--repair`."""

    def __init__(self, file: Path, problems: list[Problem]) -> None:
        causes: dict[str, list[Problem]] = {}
        for problem in problems:
            causes.setdefault(problem.cause, []).append(problem)
        lines = [_description(file, group) for group in list(causes.values())[:SHOWN]]
        if len(causes) > SHOWN:
            lines.append(f"… and {len(causes) - SHOWN} more causes")
        super().__init__("\n".join(lines))
        self.file = file
        self.problems = problems


def _description(file: Path, group: list[Problem]) -> str:
    first = group[0]
    others = f" (and {counted(len(group) - 1, 'more line')} like it)" if len(group) > 1 else ""
    repair = f"with --repair: {first.repair}" if first.repair else ""
    hint = f"; {first.hint or repair}" if first.hint or repair else ""
    return f"{first.file or file}:{first.line}: {first.reason}{others}{hint}"


class Repairs:
    """Defects and assumptions found while reading a trace, and whether defects may be repaired.

    `summary` names the format and the size of the trace; it is empty for a profile.
    """

    # Above this share of the rows, a repair would make another workload of the trace.
    MOST = 0.8
    # Repairs that keep what a row says, however many rows need them.
    HARMLESS = ("sorted by time", "renamed", "dropped the id")

    def __init__(self, file: Path, repair: bool) -> None:
        self.file = file
        self.repair = repair
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.summary = ""

    def note(self, line: int, reason: str, repair: str, hint: str = "") -> None:
        self.problems.append(Problem(line, reason, repair, self.file, hint))

    def assume(self, text: str) -> None:
        """Record an assumption about the trace, for the user; each once."""
        if text not in self.notes:
            self.notes.append(text)

    def check(self, rows: int = 0) -> None:
        """Raise TraceError if there are defects and repairs are off, or change most of `rows`."""
        if not self.problems:
            return
        if not self.repair:
            raise TraceError(self.file, self.problems)
        for repair, count in self.counts().items():
            if count > 1 and count >= self.MOST * rows > 0 and repair not in self.HARMLESS:
                same = [problem for problem in self.problems if problem.repair == repair]
                reason = f"{repair} in {count:,} of {rows:,} rows would be another trace"
                refused = Problem(same[0].line, reason, "", same[0].file)
                raise TraceError(self.file, [refused, *same])

    def counts(self) -> dict[str, int]:
        """Number of repairs by kind."""
        return dict(Counter(problem.repair for problem in self.problems))

    def lines(self) -> list[str]:
        """The assumptions, and the counts of repairs, as lines of text."""
        counts = self.counts().items()
        return [*self.notes, *(f"repaired {count:,}×: {repair}" for repair, count in counts)]
