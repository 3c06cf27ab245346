"""The processes of a mesh on one machine, with commands and environments; no I/O."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from kvmesh.settings import CONFIG, Settings, to_env, variables

START_ORDER = ("nats", "indexer", "router", "kvbm", "worker", "frontend")
STOP_ORDER = ("frontend", "worker", "kvbm", "router", "indexer", "nats")
COUNTS = {
    "indexer": "indexers",
    "router": "routers",
    "kvbm": "kvbm",
    "worker": "workers",
    "frontend": "frontends",
}


@dataclass(frozen=True)
class ProcessSpec:
    """One process: name, role, command line and environment."""

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


def service_specs(settings: Settings, environ: Mapping[str, str]) -> list[ProcessSpec]:
    """The service processes of `settings.up`, in start order."""
    inherited = _without_settings(environ)
    metrics = count(settings.up.metrics_port)
    return [
        ProcessSpec(name, role, _argv(role), {**inherited, **to_env(own)})
        for role in START_ORDER
        if role in COUNTS
        for name, own in _instances(role, settings, metrics)
    ]


def frontend_ports(settings: Settings) -> list[int]:
    """The HTTP ports of the frontends."""
    first = settings.frontend.port
    return [first + number for number in range(settings.up.frontends)]


def _argv(role: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "kvmesh.cli.main", role)


def _instances(
    role: str, settings: Settings, metrics: Iterator[int]
) -> Iterator[tuple[str, Settings]]:
    for number, own in enumerate(_sections(role, settings)):
        if role == "frontend":
            # drain before the supervisor kills the process
            drain_s = min(own.drain_timeout_s, settings.up.stop_timeout_s / 2)
            own = msgspec.structs.replace(own, port=own.port + number, drain_timeout_s=drain_s)
        elif settings.up.metrics_port:
            own = msgspec.structs.replace(own, metrics_port=next(metrics))
        yield own.name, msgspec.structs.replace(settings, **{role: own})


def _sections(role: str, settings: Settings) -> Iterator[Any]:
    """The role's settings for each of its processes, with the process's name."""
    section, replace = getattr(settings, role), msgspec.structs.replace
    if role == "worker" and settings.up.kvbm and not section.node:
        section = replace(section, node=settings.kvbm.node)
    if role == "worker" and settings.up.prefill_workers:
        for number in range(settings.up.prefill_workers):
            name = f"{section.name or role}-prefill-{number}"
            yield replace(section, name=name, serves="prefill")
        section = replace(section, serves="decode")
    for number in range(getattr(settings.up, COUNTS[role])):
        yield replace(section, name=f"{section.name or role}-{number}")


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    settings_variables = {*variables(), CONFIG}
    return {name: value for name, value in environ.items() if name not in settings_variables}
