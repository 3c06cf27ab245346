"""`kvmesh metrics`: lists the metrics of every kind of process."""

import argparse

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables of docs/metrics.md"
    )
    parser.add_argument("--of", metavar="PROCESS", help="metrics of one kind of process only")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.references.metrics import entries, markdown, sources

    if arguments.markdown:
        print(markdown(), end="")
        return 0
    known = sources()
    if arguments.of is not None and arguments.of not in known:
        print(f"no process {arguments.of}: one of {', '.join(known)}")
        return 2
    for name, source in known.items():
        if arguments.of in (None, name):
            for entry in entries(source):
                labels = f"{{{','.join(entry.labels)}}}" if entry.labels else ""
                print(f"{entry.name}{labels}  {entry.kind}: {entry.text}")
    return 0
