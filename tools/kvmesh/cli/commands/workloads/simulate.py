"""`kvmesh simulate`: runs a workload under one or several policies in virtual time."""

import argparse
from collections.abc import Sequence

from kvmesh.cli.arguments import failed, positive
from kvmesh.cli.scenario import add_scenario, scenarios, simulate, write
from kvmesh.cli.traces.options import SOURCES, add_trace_options, load_trace, title_of
from kvmesh.planner.core.promises import Promise, parse_promises
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.router.errors import RouterConfigError
from kvmesh.runtime.quantities import counted
from kvmesh.settings import Settings
from kvmesh.simulator.options import SimulationError, WorkerOptions
from kvmesh.simulator.report.answer import answer
from kvmesh.simulator.report.tables import show
from kvmesh.step_times.profile import StepProfileError
from kvmesh.terminal.console import print_line, stdout_console
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.mock.core_options import core_options
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.workload.analysis.memory import memory_line
from kvmesh.workload.errors import WorkloadError

WORKERS = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s WORKLOAD … [options]"
    parser.add_argument("sources", nargs="+", metavar="WORKLOAD", help=SOURCES)
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    add_scenario(parser, str(WORKERS), "that of [worker]", "none")
    add_trace_options(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        workload, summary = load_trace(arguments, arguments.sources, arguments.seed)
        workload = workload.first(arguments.limit)
        worker = settings.worker
        block_size = arguments.block_size or worker.block_size
        core = core_options(settings.mock, block_size, retention_options(worker))
        options = scenarios(arguments, settings, (WorkerOptions(WORKERS, core),))
        promises = parsed_promises(settings)
        runs = [simulate(workload, each) for each in options]
    except (
        WorkloadError, SimulationError, RouterConfigError, StepProfileError, PlannerConfigError,
        EngineConfigError, OSError,
    ) as error:  # fmt: skip
        return failed("simulate", error, 2)
    title = f"{title_of(arguments.sources)}, {counted(len(workload), 'request')}"
    if summary:
        print(f"{summary}\n{memory_line(workload, tokens_held(options[0].workers))}")
    status = write("simulate", arguments, title, runs)
    console = stdout_console()
    show([result for _, result in runs], console)
    for line in answer(workload, runs, promises):
        print_line(console, line)
    return status


def parsed_promises(settings: Settings) -> list[Promise]:
    """The promises of the [planner] settings to every model; raises PlannerConfigError."""
    planner = settings.planner
    named = (("ttft", planner.ttft), ("itl", planner.itl), ("queue", planner.queue))
    parsed = [promise for metric, texts in named for promise in parse_promises(metric, texts)]
    return [p for p in parsed if not p.model and not p.request_class]


def tokens_held(workers: Sequence[WorkerOptions]) -> int:
    """Prompt tokens that the engines of a fleet hold."""
    return sum(group.count * group.core.blocks * group.core.limits.block_size for group in workers)
