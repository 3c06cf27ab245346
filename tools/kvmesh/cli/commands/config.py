"""`kvmesh config`: the settings in effect, or every option there is."""

import argparse

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--markdown", action="store_true", help="the reference of all options instead"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.reference import markdown, toml

    print(markdown() if arguments.markdown else toml(settings), end="")
    return 0
