"""Errors of workloads; defects of traces and their repairs."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

SHOWN = 10


class Problem(NamedTuple):
    """One defect: its line (from 1), the reason, and the repair that `--repair` makes."""

    line: int
    reason: str
    repair: str


class WorkloadError(Exception):
    """Base class of errors in workloads, traces and profiles."""


class TraceError(WorkloadError):
    """A trace with defects that cannot be repaired, or without `--repair`."""

    def __init__(self, file: Path, problems: list[Problem]) -> None:
        lines = [f"{file}:{p.line}: {p.reason}" for p in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"… and {len(problems) - SHOWN} more")
        super().__init__("\n".join(lines))
        self.file = file
        self.problems = problems


class Repairs:
    """Defects found while reading a trace, and whether the reader may repair them."""

    def __init__(self, file: Path, repair: bool) -> None:
        self.file = file
        self.repair = repair
        self.problems: list[Problem] = []

    def note(self, line: int, reason: str, repair: str) -> None:
        self.problems.append(Problem(line, reason, repair))

    def check(self) -> None:
        """Raise TraceError if there are defects and repairs are off."""
        if self.problems and not self.repair:
            raise TraceError(self.file, sorted(self.problems))

    def counts(self) -> dict[str, int]:
        """Number of repairs by kind."""
        return dict(Counter(problem.repair for problem in self.problems))

    def lines(self) -> list[str]:
        """The counts as lines of text."""
        return [f"repaired {count:,}×: {repair}" for repair, count in self.counts().items()]
