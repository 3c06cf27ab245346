"""`kvmesh whatif`: what a live mesh has just served, under other policies or with other workers."""

import argparse
import sys
from dataclasses import replace

import msgspec
from rich.console import Console

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.messages import Instance
from kvmesh.bus.streams import StreamLimits
from kvmesh.cli.arguments import moment
from kvmesh.cli.scenario import add_scenario, mock_core, scenarios, simulate, write
from kvmesh.cli.session import run_on_bus
from kvmesh.router.errors import ConfigError
from kvmesh.settings import Settings
from kvmesh.simulator.options import SimulationError
from kvmesh.simulator.show import show
from kvmesh.worker.mock.core import CoreOptions
from kvmesh.worker.mock.profile import ProfileError
from kvmesh.workload.capture import Taken, assemble, capture
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.summary import Spread, spread

BLOCK_SIZE = 16


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since",
        type=moment,
        default="15m",
        metavar="AGO",
        help="replay what was served from then on: 90s, 5m, 2h or a time (15m)",
    )
    parser.add_argument("--model", metavar="NAME", help="of this model only")
    add_scenario(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    taken: list[Taken] = []
    workers: list[Instance] = []

    async def read(bus: Bus) -> int:
        recorder = await capture(bus, arguments.since, arguments.model)
        taken.extend(recorder.taken)
        workers.extend(await _workers(bus, arguments.model))
        return 0

    return run_on_bus("whatif", settings, read) or _compare(arguments, settings, taken, workers)


async def _workers(bus: Bus, model: str | None) -> list[Instance]:
    directory = Directory(bus, StreamLimits())
    await directory.open()
    cards = directory.instances
    await directory.close()
    return [c for c in cards if c.model is not None and model in (None, c.model.name)]


def _compare(
    arguments: argparse.Namespace, settings: Settings, taken: list[Taken], workers: list[Instance]
) -> int:
    try:
        workload = assemble(taken)
        core = _core(mock_core(settings, arguments.block_size or BLOCK_SIZE), workers)
        options = scenarios(arguments, settings, max(len(workers), 1), core)
        runs = [simulate(workload, each) for each in options]
    except (WorkloadError, SimulationError, ConfigError, ProfileError, OSError) as error:
        print(f"kvmesh whatif: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(measured(taken), markup=False, highlight=False)
    show([result for _, result in runs], console)
    return write("whatif", arguments, f"{len(workload):,} captured requests", runs)


def _core(core: CoreOptions, workers: list[Instance]) -> CoreOptions:
    """The engines as the live workers' cards describe them; their speed is not on the card."""
    card = next((c for c in workers if c.capacity is not None and c.model is not None), None)
    if card is None or card.capacity is None or card.model is None:
        return core
    limits = msgspec.structs.replace(
        core.limits,
        block_size=card.model.block_size,
        max_sequences=card.capacity.max_sequences,
        max_batched_tokens=card.capacity.max_batched_tokens,
    )
    host, disk, *_ = [*card.capacity.tier_blocks, 0, 0]
    tiers = msgspec.structs.replace(core.tiers, host_blocks=host, disk_blocks=disk)
    return replace(core, blocks=card.capacity.blocks, limits=limits, tiers=tiers)


def measured(taken: list[Taken]) -> str:
    """One line: what the mesh itself achieved on these requests."""
    prompt = sum(each.decision.tokens for each in taken)
    cached = sum(each.outcome.cached_tokens for each in taken)
    ttft = spread(each.outcome.ttft_s for each in taken if each.outcome.ttft_s is not None)
    policies = ", ".join(sorted({each.decision.policy for each in taken}))
    return (
        f"measured under {policies}: {len(taken):,} requests, "
        f"cached share {cached / max(prompt, 1):.1%}, TTFT {_ttft(ttft)}"
    )


def _ttft(ttft: Spread | None) -> str:
    if ttft is None:
        return "unknown"
    return f"p50 {ttft.p50 * 1000:,.1f} ms, p90 {ttft.p90 * 1000:,.1f} ms"
