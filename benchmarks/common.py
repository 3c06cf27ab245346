"""The common part of the benchmark scripts: CPU and memory of processes, one form of report.

CPU time is that of whole processes without their children, so figures of different runs are
comparable on a noisy machine, where wall time is not.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


def cpu_seconds(pid: int) -> float:
    """User plus system time of a live process, of all its threads, in seconds."""
    return time.clock_gettime(~pid << 3 | 2)  # its CPU clock: clock_getcpuclockid(3)


def rss_bytes(pid: int) -> int:
    """Resident memory of a live process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pss_bytes(pid: int) -> int:
    """Proportional memory of a live process: a page that n processes share counts 1/n."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.partition("\nPss:")[2].split()[0]) << 10


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, interpolated; NaN for none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Iterable[float]) -> float:
    return percentile(values, 0.5)


@dataclass
class Interval:
    """Use of a `measure` block: wall seconds, and CPU seconds of each named process."""

    wall_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())

    def of(self, prefix: str) -> float:
        """CPU seconds of the processes whose name starts with `prefix`."""
        return sum(cpu for name, cpu in self.cpu_s.items() if name.startswith(prefix))


@contextmanager
def measure(processes: Mapping[str, int]) -> Iterator[Interval]:
    """Account the CPU of `processes` (name to pid) over the block, all over the same interval."""
    interval = Interval()
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    started = time.perf_counter()
    yield interval
    interval.wall_s = time.perf_counter() - started
    interval.cpu_s = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}


@dataclass(frozen=True)
class Row:
    """One figure beside a peer's or the limit's. `target` and `baseline` are free text."""

    name: str
    value: float
    unit: str
    baseline: str = ""
    target: str = ""
    spread: str = ""


@dataclass
class Report:
    """The figures of one script: a table for people, JSON for scripts, one line to quote."""

    title: str
    baseline_name: str = "baseline"
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        baseline: str = "",
        target: str = "",
        spread: str = "",
    ) -> None:
        self.rows.append(Row(name, value, unit, baseline, target, spread))

    def add_runs(
        self, name: str, runs: list[float], unit: str, baseline: str = "", target: str = ""
    ) -> None:
        """The median of several runs, with their range."""
        spread = f"{min(runs):.3g}–{max(runs):.3g}"
        self.add(name, statistics.median(runs), unit, baseline, target, spread)

    def finish(self, summary: str, json_file: Path | None = None) -> None:
        """Print the table and the summary line; write JSON if asked."""
        table = Table(title=self.title, title_justify="left")
        table.add_column("figure")
        for heading in ("here", "range", "unit", self.baseline_name, "target"):
            table.add_column(heading, justify="left" if heading == "unit" else "right")
        for row in self.rows:
            here = f"{row.value:,.4g}" if row.value < 1000 else f"{row.value:,.0f}"
            table.add_row(row.name, here, row.spread, row.unit, row.baseline, row.target)
        Console(width=None if os.isatty(1) else 120).print(table)
        if json_file is not None:
            self.save(summary, json_file)
        print(summary)

    def save(self, summary: str, json_file: Path) -> None:
        """Write the rows so far as JSON."""
        content = {"title": self.title, "rows": [asdict(row) for row in self.rows]}
        json_file.write_text(json.dumps({**content, "summary": summary}, indent=2) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """The argument parser of a benchmark script, with the common options."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    return arguments
