"""The answer of `kvmesh plan size` as a table and in words."""

import sys
from collections.abc import Sequence
from math import inf

from kvmesh.cli.planning.size_runs import Chosen, SeedRun, fleet_text, kept_text
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.sizing.fleets import SizedFleet, simulate_fleet
from kvmesh.terminal.console import print_line, stdout_console
from kvmesh.terminal.tables import FittedTable, columns

HOURS = 730  # of a month


class SizeAnswer:
    """Prints the cheapest fleets of all seeds, and checks the largest of them on all seeds."""

    def __init__(self, promises: Sequence[Promise], options: SimulationOptions) -> None:
        self._promises = promises
        self._options = options
        self._console = stdout_console()

    def show(self, runs: Sequence[SeedRun]) -> int:
        """Print the answer; returns 0, or 1 if no fleet keeps the promises in every run."""
        figures = ("seed", "requests", "cost/h", *map(str, self._promises))
        headings = ("seed", "requests", "fleet", *figures[2:])
        table = FittedTable(columns(*headings, numbers=figures), split=True)
        for seed, each in enumerate(runs):
            if each.fleet is not None:
                table.add_row(
                    str(seed), f"{len(each.workload):,}", fleet_text(each.fleet, each.kinds),
                    f"{each.fleet.cost:g}", *(f"{share:.1%}" for share in each.fleet.shares),
                )  # fmt: skip
        table.show(self._console)
        if any(each.fleet is None for each in runs):
            return self._none(runs)
        largest = max(runs, key=lambda each: each.fleet.cost if each.fleet else inf)
        assert largest.fleet is not None
        self._answer(largest, largest.fleet, runs)
        return 0

    def _none(self, runs: Sequence[SeedRun]) -> int:
        failed = next(each for each in runs if each.fleet is None)
        chosen, most = max(failed.tried, key=lambda each: min(each[1].shares))
        reason = "no fleet keeps the promises: more workers do not help, or --kind permits no more"
        kept = kept_text(self._promises, [most])
        print(
            f"kvmesh plan size: {reason}; {fleet_text(most, chosen)} keep {kept}", file=sys.stderr
        )
        return 1

    def _answer(self, largest: SeedRun, fleet: SizedFleet, runs: Sequence[SeedRun]) -> None:
        """The answer in words: the fleet, its costs, what it keeps, and why a smaller one fails."""
        name = fleet_text(fleet, largest.kinds)
        results = [self._on(each, largest.kinds, fleet) for each in runs]
        kept = sum(result.keeps for result in results)
        equal = sum(fleet_text(each.fleet, each.kinds) == name for each in runs if each.fleet)
        lines = [
            f"{name}: {fleet.cost:g} per hour, {fleet.cost * HOURS:,.0f} per month; the cheapest"
            f" fleet in {equal} of {len(runs)} runs",
            f"it keeps the promises in {kept} of {len(runs)} runs:"
            f" {kept_text(self._promises, results)}",
        ]
        smaller = [
            (chosen, tried)
            for each in runs
            for chosen, tried in each.tried
            if not tried.keeps and tried.cost < fleet.cost
        ]
        if smaller:
            chosen, next_one = max(smaller, key=lambda each: (each[1].cost, not each[1].stopped))
            lines.append(
                f"the next smaller fleet fails: {fleet_text(next_one, chosen)} keep"
                f" {kept_text(self._promises, [next_one])}"
            )
        for line in lines:
            print_line(self._console, line)

    def _on(self, each: SeedRun, chosen: Chosen, fleet: SizedFleet) -> SizedFleet:
        """The fleet's result in a run, simulated to its end unless it was tried there."""
        for tried_kinds, tried in each.tried:
            if tried_kinds == chosen and tried.counts == fleet.counts and not tried.stopped:
                return tried
        kinds = [kind.kind for kind in chosen]
        return simulate_fleet(each.workload, kinds, fleet.counts, self._promises, self._options)
