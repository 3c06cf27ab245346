"""`kvmesh config`: prints the settings in effect, or changes some of a running mesh."""

import argparse
import sys

from kvmesh.settings import Settings

CHANGING = ("set", "unset", "changes")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh config [schema | set NAME=VALUE… | unset NAME… | changes] [options]"
    parser.epilog = (
        "`schema` prints the JSON Schema of configuration files. `set` changes settings of running "
        "frontends and routers, and of those that start later, `unset` has them take those of "
        "their start again, and `changes` lists what was changed, by whom and when. A NAME is "
        "SECTION.KEY; docs/configuration.md marks those that may change so."
    )
    parser.add_argument(
        "action", nargs="?", choices=("schema", *CHANGING), metavar="ACTION", help="see below"
    )
    parser.add_argument("names", nargs="*", metavar="NAME[=VALUE]", help="settings to change")
    parser.add_argument(
        "--markdown", action="store_true", help="print the reference of all options"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if bool(arguments.names) is not (arguments.action in ("set", "unset")):
        wanted = "needs" if arguments.action in ("set", "unset") else "takes no"
        print(f"kvmesh config: {arguments.action or 'config'} {wanted} names", file=sys.stderr)
        return 2
    if arguments.action in CHANGING:
        from kvmesh.cli.references.live_settings import change, show_changes

        if arguments.action == "changes":
            return show_changes(settings)
        return change(arguments.names, arguments.action == "unset", settings)
    if arguments.action == "schema":
        import json

        from kvmesh.cli.references.schema import settings_schema

        print(json.dumps(settings_schema(), indent=2))
        return 0
    from kvmesh.cli.references.options import markdown, toml

    print(markdown() if arguments.markdown else toml(settings), end="")
    return 0
