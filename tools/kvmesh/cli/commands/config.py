"""`kvmesh config`: prints the settings in effect, or the reference of all options."""

import argparse

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--markdown", action="store_true", help="print the reference of all options"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.references.options import markdown, toml

    print(markdown() if arguments.markdown else toml(settings), end="")
    return 0
