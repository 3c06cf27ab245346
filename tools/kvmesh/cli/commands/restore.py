"""`kvmesh restore`: stores a backup in a mesh."""

import argparse
import sys
from pathlib import Path

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh restore FILE [options]"
    parser.epilog = (
        "Restore into an empty store before any process starts: the secrets of a mesh are written"
        " once. Every value is checked before the first is stored, and read back after the last."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a file of kvmesh backup")
    parser.add_argument(
        "--replace", action="store_true", help="replace values of the mesh that differ"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.backups.archive import ArchiveError
    from kvmesh.cli.backups.store import restore
    from kvmesh.cli.bus_session import run_on_bus

    async def main(bus: Bus) -> int:
        stored = await restore(bus, arguments.file, arguments.replace)
        for bucket, number in sorted(stored.items()):
            print(f"{bucket:<12} {number}")
        print(f"{stored.total()} values stored; all of the backup are in the mesh")
        return 0

    try:
        return run_on_bus("restore", settings, main)
    except ArchiveError as error:
        print(f"kvmesh restore: {error}", file=sys.stderr)
        return 1
