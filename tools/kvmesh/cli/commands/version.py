"""`kvmesh version`."""

import argparse
from importlib.metadata import version
from importlib.util import find_spec

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    del parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    print(f"kvmesh {version('kvmesh')}, cores {cores()}")
    return 0


def cores() -> str:
    """Whether the cores run as they are, or as mypyc has compiled them."""
    core = find_spec("kvmesh.router.placement.router")
    return "interpreted" if core is None or str(core.origin).endswith(".py") else "compiled"
