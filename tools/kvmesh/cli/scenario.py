"""Shared parts of `simulate` and `simulate live`: scenario flags, runs per policy, reports."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.progress import Progress

from kvmesh.bus.messages import Instance
from kvmesh.cli.arguments import positive, result_file, seconds
from kvmesh.cli.flags import settings_flags
from kvmesh.planner.config import plan_options
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.retention.token_ranges import RetentionError
from kvmesh.router.config import check_settings
from kvmesh.settings import Settings
from kvmesh.settings.schema import WorkerSettings
from kvmesh.simulator.autoscaler import Autoscaler
from kvmesh.simulator.engines import Fleet, of_size
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.nodes.options import NodeOptions, like_live, node_options
from kvmesh.simulator.options import (
    Fault,
    Network,
    Serves,
    SimulationError,
    SimulationOptions,
    WorkerOptions,
)
from kvmesh.simulator.planning import SimulatedPlanner
from kvmesh.simulator.report.figures import Figures, figures
from kvmesh.simulator.report.page import page
from kvmesh.simulator.report.perfetto import perfetto
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.worker.engines.mock.pace import PaceOptions
from kvmesh.workload.model import Workload

SIMULATED = {
    *("block_size", "tenant_share", "session_idle_s"),
    *("shared_wait_s", "write_through_blocks", "hang_timeout_s"),  # of nodes
}
Run = tuple[Simulation, Figures]


def add_scenario(
    parser: argparse.ArgumentParser, workers: str, block_size: str, nodes: str
) -> None:
    """Add the flags of fleet, network and reports; the other arguments describe defaults."""
    parser.add_argument(
        "--policy",
        "--compare",
        metavar="A,B,…",
        help="policies to compare (the one in the [router] settings)",
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help=f"identical engines ({workers})"
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="COUNT[:KEY=VALUE,…]",
        help="groups of engines, such as 2:serves=prefill,speedup=2 and 6:serves=decode,blocks=8192"
        "; excludes --workers",
    )
    parser.add_argument(
        "--routers", type=positive, default=1, metavar="N", help="router replicas (1)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="arrivals and waits X times faster (%(default)s)",
    )
    parser.add_argument(
        "--speculative-prefill",
        choices=["off", "hinted", "auto"],
        default="off",
        help="frontends have the start of sessions' next prompts computed, up to the [frontend] "
        "settings' speculative_tokens: of all (hinted), or where it pays (auto)",
    )
    parser.add_argument(
        "--tool-events",
        action="store_true",
        help="harnesses report when tools start and end, with estimates of the time they take",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    parser.add_argument(
        "--block-size", type=positive, metavar="N", help=f"tokens per KV block ({block_size})"
    )
    _add_nodes(parser, nodes)
    _add_network(parser)
    _add_planner(parser)
    _add_reports(parser)


def _add_nodes(parser: argparse.ArgumentParser, nodes: str) -> None:
    parser.add_argument(
        "--nodes",
        type=positive,
        metavar="N",
        help=f"nodes, each with the kvbm of [kvbm], over which the engines are spread ({nodes})",
    )
    parser.add_argument(
        "--remote-bytes-per-s",
        type=positive,
        default=5_000_000_000,
        metavar="N",
        help="bandwidth between a node and the remote store, if it has one (%(default)s)",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--event-delay",
        type=float,
        default=0.003,
        metavar="S",
        help="delay of KV events on their way to the index (%(default)s)",
    )
    parser.add_argument(
        "--event-loss",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of KV event batches lost (%(default)s)",
    )
    parser.add_argument(
        "--sync-delay",
        type=float,
        default=0.002,
        metavar="S",
        help="delay of events between router replicas (%(default)s)",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND:WORKER@S",
        help="die:0@30, leave:1@60 or join:4@90; repeatable",
    )


def _add_planner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--planner",
        action="store_true",
        help="let the planner change the fleet; its pools are the groups, in order",
    )
    parser.add_argument(
        "--startup",
        type=seconds,
        default=60.0,
        metavar="S",
        help="start-up time of a worker that the planner adds (%(default)s)",
    )
    parser.add_argument(
        "--promotion",
        type=seconds,
        metavar="S",
        help="the part of it after a promotion, where pools have parked or asleep workers"
        " (a quarter)",
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=result_file, metavar="FILE", help="write the figures as JSON"
    )
    parser.add_argument(
        "--html", type=result_file, metavar="FILE", help="write a report with plots"
    )
    parser.add_argument(
        "--perfetto", type=result_file, metavar="FILE", help="write a trace of the last run"
    )


def scenarios(
    arguments: argparse.Namespace,
    settings: Settings,
    default: Fleet,
    kvbms: Sequence[Instance] = (),
) -> list[SimulationOptions]:
    """The options of each policy; raises SimulationError, RouterConfigError, StepProfileError.

    `default` is the fleet without fleet flags; its first group is the template of their engines.
    With the cards of live `kvbms`, there are as many nodes of their sizes without flags.
    """
    worker, usual = settings.worker, WorkerSettings()
    unused = [
        name
        for name in worker.__struct_fields__
        if name not in SIMULATED and getattr(worker, name) != getattr(usual, name)
    ]
    if unused:
        print(f"[worker] settings without effect here: {', '.join(unused)}", file=sys.stderr)
    names = (arguments.policy or settings.router.policy).split(",")
    fleet, nodes = _fleet(arguments, default), _nodes(arguments, settings, default, kvbms)
    return [_scenario(arguments, settings, name.strip(), fleet, nodes) for name in names]


def _scenario(
    arguments: argparse.Namespace,
    settings: Settings,
    policy: str,
    fleet: Fleet,
    nodes: NodeOptions | None,
) -> SimulationOptions:
    router = msgspec.structs.replace(settings.router, policy=policy)
    check_settings(router)
    make_planner: Callable[[], Autoscaler] | None = None
    if arguments.planner:
        make_planner, fleet = _planner(settings, fleet)
    options = SimulationOptions(
        router=router,
        workers=fleet,
        replicas=arguments.routers,
        network=Network(
            kv_events=arguments.event_delay,
            event_loss=arguments.event_loss,
            replicas=arguments.sync_delay,
        ),
        speculative_prefill=arguments.speculative_prefill,
        speculative_tokens=settings.frontend.speculative_tokens,
        tool_events=arguments.tool_events,
        faults=tuple(_fault(text) for text in arguments.fault),
        speed=arguments.speed,
        seed=arguments.seed,
        autoscaler=make_planner,
        startup_s=arguments.startup,
        promotion_s=arguments.promotion,
        nodes=nodes,
    )
    options.check()
    return options


def _nodes(
    arguments: argparse.Namespace, settings: Settings, fleet: Fleet, kvbms: Sequence[Instance]
) -> NodeOptions | None:
    count = arguments.nodes or len(kvbms)
    if not count:
        return None
    fixed = {key for section, key in settings_flags(arguments) if section == "kvbm"}
    block_bytes = fleet[0].core.limits.block_size * settings.mock.kv_bytes_per_token
    kvbm = like_live(settings.kvbm, kvbms, block_bytes, fixed)
    try:
        return node_options(
            count, kvbm, settings.mock, settings.worker, arguments.remote_bytes_per_s
        )
    except RetentionError as error:
        raise SimulationError(f"kvbm: {error}") from error


def _planner(settings: Settings, fleet: Fleet) -> tuple[Callable[[], Autoscaler], Fleet]:
    """Makes the planner of the settings; its pools are the groups of the fleet, in order.

    Returns the fleet with the workers that wait by its pools, too.
    """
    try:
        options, pools = plan_options(settings.planner, settings.router)
    except PlannerConfigError as error:
        raise SimulationError(str(error)) from error
    if len(pools) != len(fleet):
        raise SimulationError(
            f"--planner: {len(fleet)} groups of engines need as many pools, not {len(pools)};"
            " set them with --planner-pools"
        )
    for pool, group in zip(pools, fleet, strict=True):
        if pool.serves != group.serves:
            raise SimulationError(
                f"--planner: pool {pool.name} serves {pool.serves}, its group {group.serves}"
            )
    waiting = [(pool.parked, pool.asleep > 0) for pool in pools]
    return lambda: SimulatedPlanner(options, pools), tuple(
        replace(group, parked=parked, sleeps=sleeps)
        for group, (parked, sleeps) in zip(fleet, waiting, strict=True)
    )


def _fleet(arguments: argparse.Namespace, default: Fleet) -> Fleet:
    if arguments.group and arguments.workers:
        raise SimulationError("--workers and --group exclude each other")
    core = default[0].core
    if arguments.workers:
        return of_size(default, arguments.workers)
    return tuple(_group(text, core) for text in arguments.group) or default


Factor = Annotated[float, msgspec.Meta(gt=0)]


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of --group."""

    serves: Serves = "aggregated"
    speedup: Factor | None = None
    blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    node: Annotated[int, msgspec.Meta(ge=0)] | None = None
    slow_prefill: Factor | None = None
    slow_decode: Factor | None = None
    noise: Factor | None = None
    noise_s: Factor | None = None
    calm_s: Factor | None = None
    heat: Factor | None = None
    heat_s: Factor | None = None

    def pace(self, pace: PaceOptions) -> PaceOptions:
        """The pace with this group's own values."""
        own = {name: getattr(self, name) for name in PaceOptions.__dataclass_fields__}
        return replace(pace, **{name: value for name, value in own.items() if value})


def _group(text: str, core: CoreOptions) -> WorkerOptions:
    count, _, rest = text.partition(":")
    if not count.isdecimal():
        raise SimulationError(f"--group {text}: expected COUNT or COUNT:KEY=VALUE,…")
    try:
        pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
        group = msgspec.convert(pairs, _Group, strict=False)
        own = replace(
            core,
            speedup=group.speedup or core.speedup,
            blocks=group.blocks or core.blocks,
            pace=group.pace(core.pace),
        )
        return WorkerOptions(int(count), own, group.serves, node=group.node)
    except (ValueError, msgspec.ValidationError) as error:
        raise SimulationError(f"--group {text}: {error}") from None


def _fault(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    worker, _, time = rest.partition("@")
    try:
        fields = {"kind": kind, "worker": int(worker), "time": float(time)}
        return msgspec.convert(fields, Fault)
    except (ValueError, msgspec.ValidationError):
        reason = "expected KIND:WORKER@SECONDS, such as die:0@30"
        raise SimulationError(f"--fault {text}: {reason}") from None


def simulate(workload: Workload, options: SimulationOptions) -> Run:
    """Run one scenario, with a progress bar on standard error."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(options.router.policy, total=len(workload))
        simulation = Simulation(workload, options, lambda: bar.advance(task))
        simulation.run()
    return simulation, figures(simulation)


def write(name: str, arguments: argparse.Namespace, title: str, runs: Sequence[Run]) -> int:
    """Write the requested reports; return 0, or 2 if one could not be written."""
    makers: list[tuple[Path | None, Callable[[], bytes]]] = [
        (arguments.json, lambda: _json(runs)),
        (arguments.html, lambda: page(title, runs).encode()),
        (arguments.perfetto, lambda: perfetto(runs[-1][0])),
    ]
    status = 0
    for file, make in makers:
        if file is None:
            continue
        try:
            file.write_bytes(make())
        except OSError as error:
            print(f"kvmesh {name}: cannot write {file}: {error.strerror}", file=sys.stderr)
            status = 2
    return status


def _json(runs: Sequence[Run]) -> bytes:
    return msgspec.json.format(msgspec.json.encode([result for _, result in runs])) + b"\n"
