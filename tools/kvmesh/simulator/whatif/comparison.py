"""A comparison: captured requests as measured, and simulated under two configurations."""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Struct

from kvmesh.bus.messages import Instance
from kvmesh.router.config import check_settings
from kvmesh.settings.schema import MockSettings, RouterSettings
from kvmesh.simulator.engines import Fleet, live_fleet, of_size
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.whatif.runs import (
    ComparedRun,
    measured_policies,
    measured_run,
    rank_name,
    simulated_run,
)
from kvmesh.workload.capture import CapturedRound, CaptureError, assemble

PRESENT, CHOSEN = "present", "chosen"
Progress = Callable[[str, int, int], None]


class Alternative(Struct, frozen=True, kw_only=True):
    """The configuration to compare with the present one; what is empty or 0 stays as it is.

    `blocks` are KV blocks of each engine.
    """

    policy: str = ""
    workers: int = 0
    blocks: int = 0


class LiveConfiguration(Struct, frozen=True, kw_only=True):
    """The present configuration: cards of the model's workers, and settings beyond them."""

    workers: list[Instance]
    router: RouterSettings
    mock: MockSettings


class WhatIfAnswer(Struct, frozen=True, kw_only=True, tag="comparison"):
    """The same requests, as measured and as simulated; `first` and `last` arrival in Unix seconds.

    The fleets are in words.
    """

    first: float
    last: float
    measured: ComparedRun
    present: ComparedRun
    chosen: ComparedRun
    present_fleet: str
    chosen_fleet: str


def compare(
    captured: Sequence[CapturedRound],
    live: LiveConfiguration,
    other: Alternative,
    progress: Progress = lambda name, done, total: None,
) -> WhatIfAnswer:
    """Simulate the requests, sorted by arrival, under both configurations.

    The present policy is the one that placed most of them. `progress` gets a run's name, and how
    many of all its requests have ended. Raises WorkloadError, SimulationError, RouterConfigError or
    StepProfileError.
    """
    if not captured:
        raise CaptureError("no finished requests in this window")
    workload = assemble(list(captured))
    present_policy = measured_policies(captured)[0]
    present_fleet = live_fleet(live.workers, live.mock)
    chosen_fleet = _fleet(live, other)
    options = {
        PRESENT: _options(live.router, present_policy, present_fleet),
        CHOSEN: _options(live.router, other.policy or present_policy, chosen_fleet),
    }
    runs: dict[str, ComparedRun] = {}
    for name, each in options.items():
        done = 0

        def ended(name: str = name) -> None:
            nonlocal done
            done += 1
            progress(name, done, len(workload))

        progress(name, 0, len(workload))
        simulation = Simulation(workload, each, ended)
        simulation.run()
        runs[name] = simulated_run(simulation)
    return WhatIfAnswer(
        first=captured[0].arrival,
        last=captured[-1].arrival,
        measured=measured_run(captured, _ranks(live.workers)),
        present=runs[PRESENT],
        chosen=runs[CHOSEN],
        present_fleet=fleet_text(present_fleet),
        chosen_fleet=fleet_text(chosen_fleet),
    )


def _ranks(workers: Sequence[Instance]) -> Iterator[str]:
    for card in workers:
        for rank in range(card.capacity.dp_ranks if card.capacity is not None else 0):
            yield rank_name(card.name, rank)


def _fleet(live: LiveConfiguration, other: Alternative) -> Fleet:
    mock = live.mock
    fixed: tuple[str, ...] = ()
    if other.blocks:
        mock, fixed = msgspec.structs.replace(mock, blocks=other.blocks), ("blocks",)
    fleet = live_fleet(live.workers, mock, fixed)
    return of_size(fleet, other.workers) if other.workers else fleet


def _options(router: RouterSettings, policy: str, fleet: Fleet) -> SimulationOptions:
    own = msgspec.structs.replace(router, policy=policy)
    check_settings(own)
    options = SimulationOptions(router=own, workers=fleet)
    options.check()
    return options


def fleet_text(fleet: Fleet) -> str:
    """The groups of a fleet, such as `2 × 1,500 blocks`."""
    return ", ".join(
        f"{group.count} × {group.core.blocks:,} blocks"
        + (f" ({group.serves})" if group.serves != "aggregated" else "")
        for group in fleet
    )
