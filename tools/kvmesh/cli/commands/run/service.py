"""`kvmesh frontend|router|indexer|kvbm|worker|planner`: runs one in the foreground."""

import argparse
import gc
import os
import signal
from importlib import import_module

from kvmesh.cli.local import with_local_mesh
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Runs until SIGTERM or Ctrl-C, then finishes its requests and exits."


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return run_role(arguments.command, settings)


def run_role(role: str, settings: Settings) -> int:
    """Run the service of a role; returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the service handles it
    gc.disable()  # collections would find nothing of what is imported
    from kvmesh.runtime.service import run_service

    service = import_module(f"kvmesh.{role}.service")
    gc.enable()
    name = getattr(settings, role).name
    check, meanwhile = (getattr(service, part, None) for part in ("check", "meanwhile"))
    return run_service(role, name, with_local_mesh(settings), service.main, check, meanwhile)
