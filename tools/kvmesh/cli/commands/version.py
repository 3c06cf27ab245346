"""`kvmesh version`."""

import argparse
from importlib.metadata import version

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    del parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    print(f"kvmesh {version('kvmesh')}")
    return 0
