"""`kvmesh backup`: writes what only the mesh's store holds into a file, checks and restores it."""

import argparse
from collections import Counter
from pathlib import Path

from kvmesh.cli.arguments import failed, result_file
from kvmesh.settings import Settings

ACTIONS = ("save", "check", "restore")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvmesh backup save FILE [options]\n       kvmesh backup check FILE\n"
        "       kvmesh backup restore FILE [--replace] [options]"
    )
    parser.epilog = (
        "API keys, the secrets of tenants, blocks and weights, pins, stored responses, aliases,"
        " settings of the planner, busy thresholds. The file holds secrets; its mode is 0600."
        " Restore into an empty store before any process starts: the secrets of a mesh are written"
        " once. Every value is checked before the first is stored, and read back after the last."
    )
    parser.add_argument(
        "action", choices=ACTIONS, metavar="ACTION", help="save, check (without a mesh), restore"
    )
    parser.add_argument("file", metavar="FILE", help="the backup, a zip")
    parser.add_argument(
        "--replace", action="store_true", help="restore: replace values of the mesh that differ"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.backups.archive import ArchiveError, BackupManifest, read_manifest, read_values
    from kvmesh.cli.backups.store import back_up, restore
    from kvmesh.cli.bus_session import run_on_bus

    file = Path(arguments.file)

    def tell(manifest: BackupManifest) -> int:
        counts = Counter(entry.bucket for entry in manifest.values)
        for bucket, number in sorted(counts.items()):
            print(f"{bucket:<12} {number}")
        print(f"{file}: {len(manifest.values)} values of mesh {manifest.namespace}, all checked")
        return 0

    async def save(bus: Bus) -> int:
        return tell(await back_up(bus, file))

    async def store(bus: Bus) -> int:
        stored = await restore(bus, file, arguments.replace)
        for bucket, number in sorted(stored.items()):
            print(f"{bucket:<12} {number}")
        print(f"{stored.total()} values stored; all of the backup are in the mesh")
        return 0

    try:
        if arguments.action == "save":
            result_file(arguments.file)
            return run_on_bus("backup", settings, save)
        if arguments.action == "restore":
            return run_on_bus("backup", settings, store)
        manifest = read_manifest(file)
        for _ in read_values(file, manifest):
            pass
        return tell(manifest)
    except argparse.ArgumentTypeError as error:
        return failed("backup", error, 2)
    except ArchiveError as error:
        return failed("backup", error)
