"""`kvmesh frontend|router|indexer|kvbm|worker`: one service in the foreground."""

import argparse
from importlib import import_module

from kvmesh.cli.local import known
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Runs until SIGTERM or Ctrl-C, then finishes what it holds and leaves."


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.runtime.service import run_service

    role: str = arguments.command
    service = import_module(f"kvmesh.{role}.service")
    return run_service(role, getattr(settings, role).name, known(settings), service.main)
