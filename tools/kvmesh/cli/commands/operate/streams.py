"""`kvmesh config streams`: shows or changes the limits of a mesh's streams and buckets."""

import argparse

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh config streams list|apply [options]"
    parser.epilog = (
        "The first process of a mesh creates the streams with its settings; later ones do not "
        "change them. `apply` sets limits and replicas to this command's settings; if a limit "
        "shrinks, the oldest messages are deleted at once."
    )
    parser.add_argument("action", choices=("list", "apply"), help="show them, or change them")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.bus.errors import NotFound
    from kvmesh.bus.streams.configuration import apply, differences, mesh_streams
    from kvmesh.cli.arguments import failed
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.status.view import show_limits
    from kvmesh.runtime.service import stream_limits

    async def main(bus: Bus) -> int:
        infos = await mesh_streams(bus)
        if not infos:
            raise NotFound("no streams")
        changes = differences(bus, stream_limits(settings.streams), infos)
        if arguments.action == "list":
            show_limits(infos)
            for change in changes:
                print(f"{change}; `kvmesh config streams apply` changes it")
            return 0
        refused = await apply(bus, changes)
        for change in [each for each in changes if each.stream not in refused]:
            print(f"{change.stream}: {change.limit} {change.has:.15g} → {change.wanted:.15g}")
        if not changes:
            print("nothing to change")
        for reason in refused.values():
            failed("config streams", reason)
        return 1 if refused else 0

    return run_on_bus("config streams", settings, main)
