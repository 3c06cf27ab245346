"""`kvmesh config`: prints the settings in effect, their JSON Schema or their reference."""

import argparse

from kvmesh.cli.flags import TUNING
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh config [schema] [options]"
    parser.add_argument(
        "action", nargs="?", choices=("schema",), metavar="schema", help="print the JSON Schema"
    )
    parser.add_argument(
        "--markdown",
        choices=("common", TUNING),
        help="print a reference: options that meshes differ in, or those that few change",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.action == "schema":
        import json

        from kvmesh.cli.references.schema import settings_schema

        print(json.dumps(settings_schema(), indent=2))
        return 0
    from kvmesh.cli.references.options import markdown, toml

    kind = arguments.markdown
    print(markdown(kind == TUNING) if kind else toml(settings), end="")
    return 0
