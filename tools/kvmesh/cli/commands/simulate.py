"""`kvmesh simulate`: runs a workload under one or several policies in virtual time."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from kvmesh.cli.arguments import positive
from kvmesh.cli.scenario import add_scenario, scenarios, simulate, write
from kvmesh.router.errors import RouterConfigError
from kvmesh.runtime.quantities import counted
from kvmesh.settings import Settings
from kvmesh.simulator.engines import BLOCK_SIZE, mock_core
from kvmesh.simulator.options import SimulationError, WorkerOptions
from kvmesh.simulator.report.tables import show
from kvmesh.step_times.profile import StepProfileError
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.formats.registry import load

WORKERS = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s WORKLOAD [options]"
    parser.add_argument(
        "source", metavar="WORKLOAD", help="a trace, a profile or a shipped profile's name"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    parser.add_argument("--repair", action="store_true", help="repair an invalid trace")
    add_scenario(parser, str(WORKERS), str(BLOCK_SIZE), "none")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        workload, repairs = load(arguments.source, arguments.repair, arguments.seed)
        for line in repairs.lines():
            print(line, file=sys.stderr)
        workload = workload.first(arguments.limit)
        core = mock_core(settings.mock, arguments.block_size or BLOCK_SIZE)
        options = scenarios(arguments, settings, (WorkerOptions(WORKERS, core),))
        runs = [simulate(workload, each) for each in options]
    except (WorkloadError, SimulationError, RouterConfigError, StepProfileError, OSError) as error:
        print(f"kvmesh simulate: {error}", file=sys.stderr)
        return 2
    title = f"{Path(arguments.source).name}, {counted(len(workload), 'request')}"
    status = write("simulate", arguments, title, runs)
    show([result for _, result in runs], Console())
    return status
