"""`kvmesh version`: prints the version and the form of the cores."""

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
    """Form of the cores: `interpreted`, or `compiled` by mypyc."""
    core = find_spec("kvmesh.router.placement.router")
    return "interpreted" if core is None or str(core.origin).endswith(".py") else "compiled"
