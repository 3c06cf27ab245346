"""`kvmesh config`: prints the settings in effect and all metrics, or changes some of a mesh."""

import argparse

from kvmesh.cli.arguments import failed
from kvmesh.cli.flags import TUNING
from kvmesh.settings import Settings

COMMON = "common"
CHANGING = ("set", "unset", "changes")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvmesh config [schema | set NAME=VALUE… | unset NAME… | changes] [options]\n"
        "       kvmesh config metrics [--of PROCESS]"
    )
    parser.epilog = (
        "`schema` prints the JSON Schema of configuration files, `metrics` the metrics of every "
        "kind of process. `set` changes settings of running "
        "frontends and routers, and of those that start later, `unset` has them take those of "
        "their start again, and `changes` lists what was changed, by whom and when. A NAME is "
        "SECTION.KEY; docs/configuration.md marks those that may change so."
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("schema", "metrics", *CHANGING),
        metavar="ACTION",
        help="see below",
    )
    parser.add_argument("names", nargs="*", metavar="NAME[=VALUE]", help="settings to change")
    parser.add_argument(
        "--markdown",
        nargs="?",
        const=COMMON,
        choices=(COMMON, TUNING),
        metavar=TUNING,
        help="print the tables of the docs: metrics, options, or options that few meshes change",
    )
    parser.add_argument("--of", metavar="PROCESS", help="metrics of one kind of process only")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if bool(arguments.names) is not (arguments.action in ("set", "unset")):
        wanted = "needs" if arguments.action in ("set", "unset") else "takes no"
        return failed("config", f"{arguments.action or 'config'} {wanted} names", 2)
    if arguments.action in CHANGING:
        from kvmesh.cli.references.live_settings import change, show_changes

        if arguments.action == "changes":
            return show_changes(settings)
        return change(arguments.names, arguments.action == "unset", settings)
    if arguments.action == "metrics":
        return _metrics(arguments.of, arguments.markdown)
    if arguments.action == "schema":
        import json

        from kvmesh.cli.references.schema import settings_schema

        print(json.dumps(settings_schema(), indent=2))
        return 0
    from kvmesh.cli.references.options import markdown, toml

    kind = arguments.markdown
    print(markdown(kind == TUNING) if kind else toml(settings), end="")
    return 0


def _metrics(process: str | None, as_markdown: bool) -> int:
    from kvmesh.cli.references.metrics import entries, markdown, sources

    if as_markdown:
        print(markdown(), end="")
        return 0
    known = sources()
    if process is not None and process not in known:
        print(f"no process {process}: one of {', '.join(known)}")
        return 2
    for name, source in known.items():
        if process in (None, name):
            for entry in entries(source):
                labels = f"{{{','.join(entry.labels)}}}" if entry.labels else ""
                print(f"{entry.name}{labels}  {entry.kind}: {entry.text}")
    return 0
