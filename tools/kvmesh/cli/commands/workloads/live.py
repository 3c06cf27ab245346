"""`kvmesh simulate live`: simulates a mesh's recent requests under other policies or workers."""

import argparse
from math import inf

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.cli.arguments import add_since, failed, moment, positive
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.flags import settings_flags
from kvmesh.cli.scenario import add_scenario, scenarios, simulate, write
from kvmesh.router.errors import RouterConfigError
from kvmesh.runtime.quantities import counted
from kvmesh.settings import Settings
from kvmesh.simulator.engines import Fleet, live_fleet
from kvmesh.simulator.options import SimulationError
from kvmesh.simulator.report.tables import show
from kvmesh.simulator.whatif.runs import measured_run
from kvmesh.step_times.profile import StepProfileError
from kvmesh.terminal.console import print_line, stdout_console
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.workload.capture import CapturedRound, CaptureEnd, assemble, capture
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.replay.summary import Spread


def configure(parser: argparse.ArgumentParser) -> None:
    add_since(parser, "start of the capture: 90s, 5m, 2h, 1d ago or a time (%(default)s)", "15m")
    parser.add_argument(
        "--until", type=moment, metavar="AGO", help="end of the capture, likewise (now)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    parser.add_argument("--model", metavar="NAME", help="only requests of this model")
    add_scenario(parser, "as many as live ranks", "that of the live workers", "the live kvbms")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    captured: list[CapturedRound] = []
    workers: list[Instance] = []
    kvbms: list[Instance] = []

    async def read(bus: Bus) -> int:
        end = CaptureEnd(
            until=arguments.until.timestamp() if arguments.until else inf,
            most_requests=arguments.limit or inf,
        )
        recorder = await capture(bus, arguments.since, arguments.model, end=end)
        captured.extend(recorder.rounds)
        cards = await _cards(bus)
        model = arguments.model
        workers.extend(c for c in cards if c.model is not None and model in (None, c.model.name))
        kvbms.extend(used_kvbms(cards, workers))
        return 0

    status = run_on_bus("simulate live", settings, read)
    return status or _compare(arguments, settings, captured, workers, kvbms)


async def _cards(bus: Bus) -> list[Instance]:
    directory = Directory(bus, StreamLimits())
    await directory.open()
    cards = directory.instances
    await directory.close()
    return cards


def used_kvbms(cards: list[Instance], workers: list[Instance]) -> list[Instance]:
    """The kvbms of the nodes of workers that load from them."""
    nodes = {worker.node for worker in workers if worker.node}
    return [card for card in cards if card.role is Role.KVBM and card.node in nodes]


def _compare(
    arguments: argparse.Namespace,
    settings: Settings,
    captured: list[CapturedRound],
    workers: list[Instance],
    kvbms: list[Instance],
) -> int:
    try:
        workload = assemble(captured)
        options = scenarios(arguments, settings, fleet(arguments, settings, workers), kvbms)
        runs = [simulate(workload, each) for each in options]
    except (
        WorkloadError, SimulationError, RouterConfigError, StepProfileError, EngineConfigError,
        OSError,
    ) as error:  # fmt: skip
        return failed("simulate live", error, 2)
    status = write("simulate live", arguments, counted(len(workload), "captured request"), runs)
    console = stdout_console()
    print_line(console, measured(captured))
    show([result for _, result in runs], console)
    return status


def fleet(arguments: argparse.Namespace, settings: Settings, workers: list[Instance]) -> Fleet:
    """The engines of live workers, unless flags override their properties."""
    fixed = {key for section, key in settings_flags(arguments) if section == "mock"}
    retention = retention_options(settings.worker)
    return live_fleet(workers, settings.mock, fixed, arguments.block_size, retention)


def measured(captured: list[CapturedRound]) -> str:
    """A line with the mesh's own measurements of these requests."""
    run = measured_run(captured)
    return (
        f"measured under {run.policy}: {counted(run.requests, 'request')}, "
        f"cached share {run.cached_share:.1%}, TTFT {_ttft(run.ttft_s)}"
    )


def _ttft(ttft: Spread | None) -> str:
    if ttft is None:
        return "unknown"
    return f"p50 {ttft.p50 * 1000:,.1f} ms, p90 {ttft.p90 * 1000:,.1f} ms"
