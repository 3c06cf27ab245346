"""`kvmesh explain`: shows the routing decisions about a request or prefetch, and its outcome."""

import argparse

from kvmesh.cli.arguments import add_since, failed, positive
from kvmesh.settings import Settings

SLOW = 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh explain REQUEST_ID | --session NAME | --slow [options]"
    parser.epilog = (
        "The id is that of the response, also in its X-Request-Id header. Overlaps and loads are "
        "in blocks; candidates are sorted by cost."
    )
    parser.add_argument(
        "request",
        metavar="REQUEST_ID",
        nargs="?",
        help="such as chatcmpl-… or pf_…, or the client's own X-Request-Id",
    )
    parser.add_argument(
        "--session",
        metavar="NAME",
        help="the turns of a session: what each found cached, and why not more",
    )
    parser.add_argument(
        "--slow",
        choices=("total", "ttft"),
        nargs="?",
        const="total",
        help="the requests with the longest total time, or time to the first token",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=SLOW,
        metavar="N",
        help=f"most requests of --slow, and last ones of --session [default {SLOW}]",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the messages, one JSON object per line"
    )
    add_since(
        parser, "start of the search: 90s, 5m, 2h, 1d ago or a time [default the whole stream]"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    import msgspec

    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.explain import find_events, own_id, show
    from kvmesh.cli.messages.decoding import plain
    from kvmesh.cli.outcomes.show_session import show_session
    from kvmesh.cli.outcomes.show_slow import show_slow
    from kvmesh.observer.origins import origins_of
    from kvmesh.observer.prefetch_uses import PrefetchUses
    from kvmesh.observer.route_stream import each_message
    from kvmesh.terminal.console import stdout_console

    if arguments.session is not None:
        return show_session(arguments, settings)
    if arguments.slow is not None:
        return show_slow(arguments, settings)
    if arguments.request is None:
        return failed("explain", "a REQUEST_ID, --session or --slow is required", 2)

    async def main(bus: Bus) -> int:
        request, uses = own_id(arguments.request), PrefetchUses()
        events = await find_events(bus, request, arguments.since, uses)
        if not events:
            return failed("explain", f"no decision about {arguments.request}")
        if arguments.json:
            for event in events:
                print(msgspec.json.encode(plain(event)).decode())
        else:
            origins = origins_of(events)
            if origins:
                await each_message(bus, None, origins.add)
            show(events, stdout_console(), uses, origins)
        return 0

    return run_on_bus("explain", settings, main)
