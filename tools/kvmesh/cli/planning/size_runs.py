"""The cheapest fleet of each seed: the first seed's begins the search of the others."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import inf
from multiprocessing import active_children, get_context
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType

from kvmesh.cli.planning.kinds import TieredKind
from kvmesh.planner.core.fleets import Counts
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.sizing.fleets import SizedFleet
from kvmesh.simulator.sizing.search import size_fleet
from kvmesh.workload.model import Workload

PARALLEL = 3000  # requests: with fewer, a process takes longer to start than it saves

Chosen = tuple[TieredKind, ...]


@dataclass
class SeedRun:
    """The answer of one seed: the cheapest fleet and its kinds, and all fleets tried."""

    workload: Workload
    kinds: Chosen
    fleet: SizedFleet | None = None
    tried: list[tuple[Chosen, SizedFleet]] = field(default_factory=list)


@dataclass(frozen=True)
class SeedRuns:
    """Finds the cheapest fleet of each workload over all choices of tiers.

    `progress` has each simulated fleet printed on standard error.
    """

    choices: Sequence[Chosen]
    promises: Sequence[Promise]
    options: SimulationOptions
    progress: bool = False

    def size(self, workloads: Sequence[Workload]) -> list[SeedRun]:
        """The runs of all workloads: the first one, then the others side by side.

        If no fleet keeps the promises in the first run, there are no others. Ctrl-C ends their
        processes. Raises BrokenProcessPool if one of these was killed.
        """
        first = self.run(workloads[0], 0)
        if first.fleet is None:
            return [first]
        begin = first.kinds, first.fleet.counts
        others = range(1, len(workloads))
        jobs = min(os.cpu_count() or 1, len(others))
        if jobs < 2 or len(workloads[0]) < PARALLEL:
            return [first, *(self.run(workloads[seed], seed, begin) for seed in others)]
        _prepare_pickling()
        before = set(active_children())
        with ProcessPoolExecutor(jobs, get_context("spawn"), _start_process) as pool:
            running = [pool.submit(_search, self, workloads[n], n, begin) for n in others]
            try:
                for future in as_completed(running):
                    future.result()  # the first error ends the wait
            except BaseException:
                for future in running:
                    future.cancel()
                for child in set(active_children()) - before:
                    child.terminate()
                raise
        found = [future.result() for future in running]
        return [first, *(SeedRun(workloads[n], *f) for n, f in zip(others, found, strict=True))]

    def run(
        self, workload: Workload, seed: int, begin: tuple[Chosen, Counts] | None = None
    ) -> SeedRun:
        """The run of one workload; `begin` is a fleet that is probably near its answer."""
        choices = list(self.choices)
        best = SeedRun(workload, choices[0])
        near: Counts | None = None
        if begin is not None:
            chosen, near = begin
            choices.sort(key=lambda each: each != chosen)
        for chosen in choices:

            def tried(fleet: SizedFleet, chosen: Chosen = chosen) -> None:
                best.tried.append((chosen, fleet))
                if self.progress:
                    self._show(seed, chosen, fleet)

            found = size_fleet(
                workload,
                [each.kind for each in chosen],
                self.promises,
                self.options,
                tried,
                best.fleet.cost if best.fleet is not None else inf,
                near,
            )
            if found is not None:
                best.fleet, best.kinds, near = found, chosen, found.counts
        return best

    def _show(self, seed: int, chosen: Chosen, fleet: SizedFleet) -> None:
        kept = kept_text(self.promises, [fleet])
        print(f"seed {seed}: {fleet_text(fleet, chosen)}: {kept}", file=sys.stderr, flush=True)


def kept_text(promises: Sequence[Promise], results: Sequence[SizedFleet]) -> str:
    """The range of the kept share of each promise over results."""
    parts = []
    bound = "at most " if any(result.stopped for result in results) else ""
    for place, promise in enumerate(promises):
        low = min(result.shares[place] for result in results)
        high = max(result.shares[place] for result in results)
        text = f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
        parts.append(f"{promise} for {bound}{text}")
    return ", ".join(parts)


def fleet_text(fleet: SizedFleet, chosen: Chosen) -> str:
    """Workers of each kind, with their tiers."""
    return ", ".join(
        f"{count} {each.text}" for count, each in zip(fleet.counts, chosen, strict=True) if count
    )


def _search(
    runs: SeedRuns, workload: Workload, seed: int, begin: tuple[Chosen, Counts]
) -> tuple[Chosen, SizedFleet | None, list[tuple[Chosen, SizedFleet]]]:
    """The kinds, fleet and tried fleets of a run, without the workload, which is large."""
    found = runs.run(workload, seed, begin)
    return found.kinds, found.fleet, found.tried


def _start_process() -> None:
    """Let Ctrl-C end a process of the pool at once and silently; the first process reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prepare_pickling()


def _prepare_pickling() -> None:
    """Let read-only mappings, which engines' options have, pass between processes."""
    ForkingPickler.register(MappingProxyType, _reduce_mapping)


def _reduce_mapping(
    mapping: "MappingProxyType[object, object]",
) -> tuple[Callable[..., object], tuple[dict[object, object]]]:
    return _read_only, (dict(mapping),)


def _read_only(items: dict[object, object]) -> "MappingProxyType[object, object]":
    return MappingProxyType(items)
