"""The judge over bandwidths between engines and host memory, and over loads.

A cell is a bandwidth and a load: the pace of the agents, relative to that of the other parts. In
each cell engines have the memory with which LRU with the linear cost has 90 % of the ideal hits at
that pace, and host memory of twice that. Waits are compared with those of that LRU without host
memory, as vLLM has it by default.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from agentic_runs import BELADY, COST, FILTERED, LINEAR, LRU, SHARED, Policy, Result, Scene, play
from common import Report
from rich.console import Console
from rich.table import Table

from kvmesh.workload.model import Workload

GB = 1e9
POLICIES = (LRU, FILTERED, COST, SHARED, BELADY)
Make = Callable[[int], Workload]
Least = Callable[[Workload, Scene, int], int]


@dataclass(frozen=True)
class Grid:
    """Bandwidths in GB/s, and loads as shares of the pace of `scene`."""

    make: Make
    least: Least
    scene: Scene
    bandwidths: tuple[float, ...] = (0.5, 1.5, 3.0, 8.0, 25.0)
    loads: tuple[float, ...] = (0.6, 0.8, 1.0, 1.2)

    def few(self) -> "Grid":
        """Six of the cells."""
        return replace(self, bandwidths=(0.5, 3.0, 25.0), loads=(0.6, 1.0))

    @property
    def cells(self) -> list[tuple[float, float]]:
        """Bandwidth and load of each cell."""
        return [(bandwidth, load) for bandwidth in self.bandwidths for load in self.loads]


@dataclass(frozen=True)
class Column:
    """The results of one seed at one load: of LRU with the linear cost, and of each policy."""

    load: float
    base: Result
    results: dict[tuple[str, float], Result]


def column(grid: Grid, task: tuple[int, float]) -> Column:
    """Run one seed at one load."""
    seed, load = task
    workload = grid.make(seed)
    scene = replace(grid.scene, speed=grid.scene.speed * load)
    scene = replace(scene, memory=grid.least(workload, scene, seed))
    results = {}
    base = play(workload, scene, LINEAR, seed)
    for bandwidth in grid.bandwidths:
        cell = replace(scene, host=2, host_bytes_per_s=bandwidth * GB)
        for policy in POLICIES:
            place = f"grid, seed {seed}, load {load:.0%}, {bandwidth:g} GB/s"
            print(f"{place}: {policy.name}", file=sys.stderr, flush=True)
            results[policy.name, bandwidth] = play(workload, cell, policy, seed)
    return Column(load, base, results)


class GridResults:
    """Medians over the seeds, by policy and cell."""

    def __init__(self, grid: Grid, columns: list[Column]) -> None:
        self.grid = grid
        self._columns = columns

    def ratio(self, policy: Policy, bandwidth: float, load: float) -> float:
        """TTFT p95 of returning turns over that of LRU with the linear cost."""
        return median(
            column.results[policy.name, bandwidth].ttft_p95 / column.base.ttft_p95
            for column in self._columns
            if column.load == load
        )

    def ratios(self, policy: Policy) -> list[float]:
        """The ratio of each cell."""
        return [self.ratio(policy, *cell) for cell in self.grid.cells]

    def latency(self, policy: Policy, bandwidth: float, load: float) -> float:
        """Mean latency over that of LRU with the linear cost."""
        return median(
            column.results[policy.name, bandwidth].latency / column.base.latency
            for column in self._columns
            if column.load == load
        )

    def of_ideal(self, policy: Policy, bandwidth: float, load: float) -> float:
        """Share of the ideal hits, in percent."""
        return median(
            100 * column.results[policy.name, bandwidth].of_ideal
            for column in self._columns
            if column.load == load
        )


def run_grid(grid: Grid, seeds: tuple[int, ...], jobs: int) -> GridResults:
    """Run all cells in `jobs` processes."""
    tasks = [(seed, load) for seed in seeds for load in grid.loads]
    if jobs == 1:
        return GridResults(grid, [column(grid, task) for task in tasks])
    with ProcessPoolExecutor(jobs) as pool:
        return GridResults(grid, list(pool.map(partial(column, grid), tasks)))


def show_grid(found: GridResults, console: Console) -> None:
    """Print a row for each policy and bandwidth."""
    grid = found.grid
    table = Table(title="90 coding agents, by bandwidth and load", title_justify="left")
    table.add_column("policy")
    table.add_column("GB/s", justify="right")
    for load in grid.loads:
        table.add_column(f"load {load:.0%}:\np95 / LRU's", justify="right")
    for load in grid.loads:
        table.add_column(f"{load:.0%}:\nof ideal", justify="right")
    for policy in POLICIES:
        for bandwidth in grid.bandwidths:
            ratios = [f"{found.ratio(policy, bandwidth, load):.2f}" for load in grid.loads]
            shares = [f"{found.of_ideal(policy, bandwidth, load):.1f}" for load in grid.loads]
            table.add_row(policy.name, f"{bandwidth:g}", *ratios, *shares)
    console.print(table)


def judge_grid(report: Report, found: GridResults) -> None:
    """Add the figures that have a target."""
    cells = found.grid.cells
    rivals = (LRU, FILTERED, COST)
    for name, pick, goal in (("median", median, "≤ 0.60"), ("worst", max, "≤ 1.0")):
        best = min(rivals, key=lambda policy, pick=pick: pick(found.ratios(policy)))  # type: ignore[misc]
        others = f"{best.name} {pick(found.ratios(best)):.2f}, "
        others += f"Bélády {pick(found.ratios(BELADY)):.2f}"
        value = pick(found.ratios(SHARED))
        report.add(f"grid: TTFT p95, {name} cell", value, "× LRU's", others, goal)
    shares = [found.of_ideal(SHARED, *cell) for cell in cells]
    report.add_runs("grid: of ideal, median cell", shares, "%", "", "≥ 98.5")
    latencies = [found.latency(SHARED, *cell) for cell in cells]
    report.add("grid: mean latency, worst cell", max(latencies), "× LRU's", "1", "≤ 1.03")
