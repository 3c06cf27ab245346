"""`kvmesh backup`: writes what only the mesh's store holds into a file."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from kvmesh.cli.arguments import result_file
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh backup FILE [options]\n       kvmesh backup --check FILE"
    parser.epilog = (
        "API keys, the secrets of tenants, blocks and weights, pins, stored responses, aliases,"
        " settings of the planner, busy thresholds. The file holds secrets; its mode is 0600."
    )
    parser.add_argument("file", type=result_file, metavar="FILE", help="the backup, a zip")
    parser.add_argument(
        "--check", action="store_true", help="check a backup that exists, without a mesh"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.backups.archive import ArchiveError, BackupManifest, read_manifest, read_values
    from kvmesh.cli.backups.store import back_up
    from kvmesh.cli.bus_session import run_on_bus

    file: Path = arguments.file

    def tell(manifest: BackupManifest) -> int:
        counts = Counter(entry.bucket for entry in manifest.values)
        for bucket, number in sorted(counts.items()):
            print(f"{bucket:<12} {number}")
        print(f"{file}: {len(manifest.values)} values of mesh {manifest.namespace}, all checked")
        return 0

    async def main(bus: Bus) -> int:
        return tell(await back_up(bus, file))

    try:
        if not arguments.check:
            return run_on_bus("backup", settings, main)
        manifest = read_manifest(file)
        for _ in read_values(file, manifest):
            pass
        return tell(manifest)
    except ArchiveError as error:
        print(f"kvmesh backup: {error}", file=sys.stderr)
        return 1
