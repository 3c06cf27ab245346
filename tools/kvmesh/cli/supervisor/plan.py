"""The processes of a mesh on one machine, with commands and environments; no I/O."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from kvmesh.planner.core.pools import parse_pools
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.settings import CONFIG, Settings, to_env, variables
from kvmesh.settings.schema import DashboardSettings, PlannerSettings

CARDLESS = ("nats", "dashboard")  # they do not announce themselves on the bus
START_ORDER = (
    "nats",
    "indexer",
    "router",
    "kvbm",
    "worker",
    "frontend",
    "planner",
    "dashboard",
)
STOP_ORDER = (
    "dashboard",
    "planner",
    "frontend",
    "worker",
    "kvbm",
    "router",
    "indexer",
    "nats",
)
# the workers' ports come last: a planner may start more of them
METRICS_ORDER = ("indexer", "router", "kvbm", "planner", "worker")
COUNTS = {
    "indexer": "indexers",
    "router": "routers",
    "kvbm": "kvbm",
    "worker": "workers",
    "frontend": "frontends",
    "planner": "planner",
    "dashboard": "dashboard",
}

# engines that are no more than code of this package
LIGHT_ENGINES = {
    "mock": "kvmesh.worker.engines.mock.engine",
    "openai": "kvmesh.worker.engines.remote.engine",
}
HEAVY_ROLES = ("dashboard",)  # their libraries may start threads


@dataclass(frozen=True)
class ProcessSpec:
    """One process: name, role, command line and environment.

    It may be a fork that has imported `modules`; without any, it runs a new program.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of one pool: the number at the start, the prefix of names, and the settings.

    `count` are to serve, at the start, and `parked` more wait: then all of them start parked.
    """

    pool: str
    prefix: str
    count: int
    settings: Settings
    parked: int = 0

    @property
    def processes(self) -> int:
        """The number of processes at the start."""
        return self.count + self.parked


def service_specs(settings: Settings, environ: Mapping[str, str]) -> list[ProcessSpec]:
    """The service processes of `settings.up`, in start order."""
    metrics = count(settings.up.metrics_port)
    specs: list[ProcessSpec] = []
    for role in (*METRICS_ORDER, "frontend", "dashboard"):
        if role == "worker":
            specs += _workers(settings, metrics, environ)
        else:
            instances = _instances(role, settings, metrics)
            specs += [_spec(role, name, own, environ) for name, own in instances]
    return sorted(specs, key=lambda spec: START_ORDER.index(spec.role))


def worker_groups(settings: Settings) -> list[WorkerGroup]:
    """The pools of workers: `workers`, or `prefill` and `decode` with prefill workers."""
    up, worker, replace = settings.up, settings.worker, msgspec.structs.replace
    if up.kvbm and not worker.node:
        worker = replace(worker, node=settings.kvbm.node)
    prefix = worker.name or "worker"
    parked = parked_workers(settings)
    if not up.prefill_workers:
        groups = [("workers", prefix, up.workers, worker)]
    else:
        groups = [
            ("prefill", f"{prefix}-prefill", up.prefill_workers, replace(worker, serves="prefill")),
            ("decode", prefix, up.workers, replace(worker, serves="decode")),
        ]
    return [
        WorkerGroup(
            pool,
            names,
            count,
            replace(settings, worker=replace(own, parked=own.parked or pool in parked)),
            parked.get(pool, 0),
        )
        for pool, names, count, own in groups
    ]


def parked_workers(settings: Settings) -> dict[str, int]:
    """The number of parked workers of each pool that has some, as the planner wants them."""
    up = settings.up
    if not up.planner:
        return {}
    if settings.planner.pools == PlannerSettings().pools:
        names = ("prefill", "decode") if up.prefill_workers else ("workers",)
        return dict.fromkeys(names, up.parked) if up.parked else {}
    try:
        pools = parse_pools(settings.planner.pools)
    except PlannerConfigError:  # the planner says so, and does not start
        return {}
    return {pool.name: pool.parked for pool in pools if pool.parked}


def worker_spec(
    group: WorkerGroup, number: int, metrics_port: int, environ: Mapping[str, str]
) -> ProcessSpec:
    """Worker `number` of a group; `metrics_port` is 0 for none."""
    own, replace = group.settings, msgspec.structs.replace
    worker = replace(own.worker, name=f"{group.prefix}-{number}")
    if metrics_port:
        worker = replace(worker, metrics_port=metrics_port)
    return _spec("worker", worker.name, replace(own, worker=worker), environ)


def first_worker_port(settings: Settings) -> int:
    """The metrics port of the first worker; 0 for none."""
    up = settings.up
    before = sum(getattr(up, COUNTS[role]) for role in METRICS_ORDER if role != "worker")
    return up.metrics_port + before if up.metrics_port else 0


def most_workers(settings: Settings, group: WorkerGroup) -> int:
    """The bound of a pool whose workers start and stop at run time."""
    return max(settings.up.max_workers, group.count) + group.parked


def frontend_ports(settings: Settings) -> list[int]:
    """The HTTP ports of the frontends."""
    first = settings.frontend.port
    return [first + number for number in range(settings.up.frontends)]


def _spec(role: str, name: str, own: Settings, environ: Mapping[str, str]) -> ProcessSpec:
    # the name is in the environment, too: here, `ps` shows it
    command = (sys.executable, "-m", "kvmesh.cli.main", role, f"--name={name}")
    environment = {**_without_settings(environ), **to_env(own)}
    return ProcessSpec(name, role, command, environment, _modules(role, own))


def _modules(role: str, own: Settings) -> tuple[str, ...]:
    """The modules that another process imports for this one; empty if it runs a new program."""
    service = f"kvmesh.{role}.service"
    if role == "worker":
        engine = LIGHT_ENGINES.get(own.worker.engine)
        return (service, engine) if engine is not None else ()
    return (service,) if role not in HEAVY_ROLES else ()


def _workers(
    settings: Settings, metrics: Iterator[int], environ: Mapping[str, str]
) -> Iterator[ProcessSpec]:
    for group in worker_groups(settings):
        for number in range(group.processes):
            port = next(metrics) if settings.up.metrics_port else 0
            yield worker_spec(group, number, port, environ)


def _instances(
    role: str, settings: Settings, metrics: Iterator[int]
) -> Iterator[tuple[str, Settings]]:
    for number, own in enumerate(_sections(role, settings)):
        if role == "frontend":
            # two share the port while one replaces the other
            own = msgspec.structs.replace(own, port=own.port + number, reuse_port=True)
        elif role in METRICS_ORDER and settings.up.metrics_port:
            own = msgspec.structs.replace(own, metrics_port=next(metrics))
        yield own.name, msgspec.structs.replace(settings, **{role: own})


def _sections(role: str, settings: Settings) -> Iterator[Any]:
    """The role's settings for each of its processes, with the process's name."""
    section, replace = getattr(settings, role), msgspec.structs.replace
    if role == "planner":
        section = _planner(settings)
    elif role == "dashboard":
        section = _dashboard(settings)
    for number in range(getattr(settings.up, COUNTS[role])):
        yield replace(section, name=f"{section.name or role}-{number}")


def _dashboard(settings: Settings) -> DashboardSettings:
    """The dashboard's settings; it needs the keys of the frontends unless it has others."""
    section, frontend = settings.dashboard, settings.frontend
    if section.keys_file or section.keys_bucket:
        return section
    return msgspec.structs.replace(
        section, keys_file=frontend.keys_file, keys_bucket=frontend.keys_bucket
    )


def _planner(settings: Settings) -> PlannerSettings:
    """The planner's settings; it scales this mesh unless they name another connector or pools."""
    section = settings.planner
    if section.connector == "advisory":
        section = msgspec.structs.replace(section, connector="processes")
    if section.pools == PlannerSettings().pools:
        groups = worker_groups(settings)
        kind = ",kind=worker" if len(groups) > 1 else ""  # they differ in their role alone

        def waiting(group: WorkerGroup) -> str:
            parked, asleep = group.parked, 0 if kind else settings.up.asleep
            return f",parked={parked}" * (parked > 0) + f",asleep={asleep}" * (asleep > 0)

        pools = [
            f"{group.pool}:serves={group.settings.worker.serves},min=1"
            f",max={most_workers(settings, group) - group.parked}{waiting(group)}{kind}"
            for group in groups
        ]
        section = msgspec.structs.replace(section, pools=pools)
    return section


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    settings_variables = {*variables(), CONFIG}
    return {name: value for name, value in environ.items() if name not in settings_variables}
