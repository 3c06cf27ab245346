"""What can be wrong with a trace, and how it is told."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

SHOWN = 10


class Problem(NamedTuple):
    """One defect: the line it is on (from 1), what it is, and how `--repair` mends it."""

    line: int
    reason: str
    repair: str


class WorkloadError(Exception):
    """Base of everything that this package raises about its input."""


class TraceError(WorkloadError):
    """A trace with defects that was not to be repaired, or cannot be."""

    def __init__(self, file: Path, problems: list[Problem]) -> None:
        lines = [f"{file}:{p.line}: {p.reason}" for p in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"… and {len(problems) - SHOWN} more")
        super().__init__("\n".join(lines))
        self.file = file
        self.problems = problems


class Repairs:
    """Collects defects while reading; refuses at the end unless they are to be repaired."""

    def __init__(self, file: Path, repair: bool) -> None:
        self.file = file
        self.repair = repair
        self.problems: list[Problem] = []

    def note(self, line: int, reason: str, repair: str) -> None:
        self.problems.append(Problem(line, reason, repair))

    def settle(self) -> None:
        """Raises TraceError if there were defects and none may be repaired."""
        if self.problems and not self.repair:
            raise TraceError(self.file, sorted(self.problems))

    def counts(self) -> dict[str, int]:
        """How often each kind of repair was made."""
        return dict(Counter(problem.repair for problem in self.problems))

    def lines(self) -> list[str]:
        """The same for people."""
        return [f"repaired {count:,}×: {repair}" for repair, count in self.counts().items()]
