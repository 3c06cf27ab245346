"""`kvmesh whatif`: simulates a live mesh's recent requests under other policies or workers."""

import argparse
import sys
from collections import Counter
from typing import NamedTuple

import msgspec
from rich.console import Console

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Capacity, Instance, ModelCard
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.cli.arguments import moment
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.flags import settings_flags
from kvmesh.cli.scenario import Fleet, add_scenario, mock_core, scenarios, simulate, write
from kvmesh.router.errors import RouterConfigError
from kvmesh.runtime.quantities import counted
from kvmesh.settings import Settings
from kvmesh.settings.schema import MockSettings
from kvmesh.simulator.options import Serves, SimulationError, WorkerOptions
from kvmesh.simulator.report.tables import show
from kvmesh.step_times.profile import StepProfileError
from kvmesh.workload.capture import CapturedRound, assemble, capture
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.replay.summary import Spread, spread

BLOCK_SIZE = 16


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since",
        type=moment,
        default="15m",
        metavar="AGO",
        help="start of the capture: 90s, 5m, 2h, 1d ago or a time (%(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="only requests of this model")
    add_scenario(parser, "as many as live ranks", "that of the live workers")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    captured: list[CapturedRound] = []
    workers: list[Instance] = []

    async def read(bus: Bus) -> int:
        recorder = await capture(bus, arguments.since, arguments.model)
        captured.extend(recorder.rounds)
        workers.extend(await _workers(bus, arguments.model))
        return 0

    return run_on_bus("whatif", settings, read) or _compare(arguments, settings, captured, workers)


async def _workers(bus: Bus, model: str | None) -> list[Instance]:
    directory = Directory(bus, StreamLimits())
    await directory.open()
    cards = directory.instances
    await directory.close()
    return [c for c in cards if c.model is not None and model in (None, c.model.name)]


def _compare(
    arguments: argparse.Namespace,
    settings: Settings,
    captured: list[CapturedRound],
    workers: list[Instance],
) -> int:
    try:
        workload = assemble(captured)
        options = scenarios(arguments, settings, fleet(arguments, settings, workers))
        runs = [simulate(workload, each) for each in options]
    except (WorkloadError, SimulationError, RouterConfigError, StepProfileError, OSError) as error:
        print(f"kvmesh whatif: {error}", file=sys.stderr)
        return 2
    status = write("whatif", arguments, counted(len(workload), "captured request"), runs)
    console = Console()
    console.print(measured(captured), markup=False, highlight=False, soft_wrap=True)
    show([result for _, result in runs], console)
    return status


class EngineKind(NamedTuple):
    """The properties by which live workers are grouped for the simulation."""

    serves: str
    block_size: int
    blocks: int
    max_sequences: int
    max_batched_tokens: int
    host_blocks: int
    disk_blocks: int


def fleet(arguments: argparse.Namespace, settings: Settings, workers: list[Instance]) -> Fleet:
    """One engine per live rank with the properties of its worker's card, unless flags override.

    The card has no speed. Without any card, the fleet is one engine of the settings.
    """
    ranks: Counter[EngineKind] = Counter()
    for card in sorted(workers, key=lambda card: (card.serves == "prefill", card.name)):
        if card.capacity is not None and card.model is not None:
            ranks[_kind(card, card.model, card.capacity)] += card.capacity.dp_ranks
    if not ranks:
        return (WorkerOptions(1, mock_core(settings.mock, arguments.block_size or BLOCK_SIZE)),)
    return tuple(_group(arguments, settings, kind, count) for kind, count in ranks.items())


def _kind(card: Instance, model: ModelCard, capacity: Capacity) -> EngineKind:
    host, disk, *_ = [*capacity.tier_blocks, 0, 0]
    return EngineKind(
        serves=card.serves,
        block_size=model.block_size,
        blocks=capacity.blocks,
        max_sequences=capacity.max_sequences,
        max_batched_tokens=capacity.max_batched_tokens,
        host_blocks=host,
        disk_blocks=disk,
    )


def _group(
    arguments: argparse.Namespace, settings: Settings, kind: EngineKind, count: int
) -> WorkerOptions:
    flags = settings_flags(arguments)
    live = {
        key: value
        for key, value in kind._asdict().items()
        if key in MockSettings.__struct_fields__ and ("mock", key) not in flags
    }
    mock = msgspec.structs.replace(settings.mock, **live)
    core = mock_core(mock, arguments.block_size or kind.block_size)
    return WorkerOptions(count, core, msgspec.convert(kind.serves, Serves))


def measured(captured: list[CapturedRound]) -> str:
    """A line with the mesh's own measurements of these requests."""
    prompt = sum(each.decision.tokens for each in captured)
    cached = sum(each.outcome.cached_tokens for each in captured)
    ttft = spread(each.outcome.ttft_s for each in captured if each.outcome.ttft_s is not None)
    policies = ", ".join(sorted({each.decision.policy for each in captured}))
    return (
        f"measured under {policies}: {counted(len(captured), 'request')}, "
        f"cached share {cached / max(prompt, 1):.1%}, TTFT {_ttft(ttft)}"
    )


def _ttft(ttft: Spread | None) -> str:
    if ttft is None:
        return "unknown"
    return f"p50 {ttft.p50 * 1000:,.1f} ms, p90 {ttft.p90 * 1000:,.1f} ms"
