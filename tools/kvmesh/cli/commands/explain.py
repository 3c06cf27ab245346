"""`kvmesh explain`: shows the routing decisions about a request or prefetch, and its outcome."""

import argparse
import sys

from kvmesh.cli.arguments import moment
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh explain REQUEST_ID [options]"
    parser.epilog = (
        "The id is that of the response, also in its X-Request-Id header. Overlaps and loads are "
        "in blocks; candidates are sorted by cost."
    )
    parser.add_argument("request", metavar="REQUEST_ID", help="such as chatcmpl-… or pf_…")
    parser.add_argument(
        "--json", action="store_true", help="print the messages, one JSON object per line"
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="AGO",
        help="start of the search: 90s, 5m, 2h, 1d ago or a time [default the whole stream]",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    import msgspec
    from rich.console import Console

    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.explain import find_events, own_id, show
    from kvmesh.cli.messages.decoding import plain
    from kvmesh.cli.prefetch_uses import PrefetchUses

    async def main(bus: Bus) -> int:
        request, uses = own_id(arguments.request), PrefetchUses()
        events = await find_events(bus, request, arguments.since, uses)
        if not events:
            print(f"kvmesh explain: no decision about {arguments.request}", file=sys.stderr)
            return 1
        if arguments.json:
            for event in events:
                print(msgspec.json.encode(plain(event)).decode())
        else:
            console = Console(highlight=False)
            wide = console if console.is_terminal else Console(highlight=False, width=160)
            show(events, wide, uses)
        return 0

    return run_on_bus("explain", settings, main)
