"""Services of several roles in one process, of which each fork runs one."""

import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from kvmesh.cli.commands.run.service import run_role
from kvmesh.settings import load


def import_services(modules: Iterable[str]) -> None:
    """Import services for `run_fork`; this process exports the metrics of none of them."""
    for module in ("kvmesh.runtime.service", *modules):
        import_module(module)
    roles = {name.split(".")[1] for name in sys.modules if name.startswith("kvmesh.")}
    for metric in [metric for role in roles for metric in _metrics(role)]:
        REGISTRY.unregister(metric)


def run_fork(role: str) -> int:
    """Run the service of a role with settings from the environment; returns the exit status."""
    for metric in _metrics(role):
        REGISTRY.register(metric)
    return run_role(role, load(None, os.environ, {}))


def _metrics(role: str) -> Iterator[MetricWrapperBase]:
    module = sys.modules.get(f"kvmesh.{role}.metrics")
    values = vars(module).values() if module is not None else ()
    return (value for value in values if isinstance(value, MetricWrapperBase))
