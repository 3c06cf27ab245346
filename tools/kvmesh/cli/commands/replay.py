"""`kvmesh replay`: send a trace to a mesh over HTTP."""

import argparse

from kvmesh.settings import Settings
from kvmesh.workload.replay import add_arguments
from kvmesh.workload.replay import run as replay


def configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return replay(arguments)
