"""`kvmesh frontend|router|indexer|kvbm|worker|planner|oracle`: runs one in the foreground."""

import argparse
import gc
import os
import sys
from importlib import import_module
from types import ModuleType

from kvmesh.cli.local import with_local_mesh
from kvmesh.settings import Settings, load


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Runs until SIGTERM or Ctrl-C, then finishes its requests and exits."


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return _run(arguments.command, settings)


def run_fork(role: str) -> int:
    """Run a service with settings from the environment, in a process that has others, too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvmesh.") and name.endswith(".metrics") and name.split(".")[1] != role:
            _forget(module)
    return _run(role, load(None, os.environ, {}))


def _forget(metrics: ModuleType) -> None:
    """Have this process export none of the metrics of a module."""
    from prometheus_client import REGISTRY
    from prometheus_client.metrics import MetricWrapperBase

    for value in vars(metrics).values():
        if isinstance(value, MetricWrapperBase):
            REGISTRY.unregister(value)


def _run(role: str, settings: Settings) -> int:
    gc.disable()  # collections would find nothing of what is imported
    from kvmesh.runtime.service import run_service

    service = import_module(f"kvmesh.{role}.service")
    gc.enable()
    name = getattr(settings, role).name
    check, meanwhile = (getattr(service, part, None) for part in ("check", "meanwhile"))
    return run_service(role, name, with_local_mesh(settings), service.main, check, meanwhile)
