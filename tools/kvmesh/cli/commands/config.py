"""`kvmesh config`: prints the settings in effect, their JSON Schema, or all metrics."""

import argparse

from kvmesh.cli.flags import TUNING
from kvmesh.settings import Settings

COMMON = "common"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh config [schema] [options]\n       kvmesh config metrics [--of PROCESS]"
    parser.add_argument(
        "action",
        nargs="?",
        choices=("schema", "metrics"),
        metavar="schema|metrics",
        help="print the JSON Schema of the settings, or the metrics of every kind of process",
    )
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
