"""`kvmesh tail`: prints the messages on the bus, decoded, one per line."""

import argparse
import re
import sys

from kvmesh.bus.subjects import ROOT
from kvmesh.cli.arguments import add_since, failed, positive
from kvmesh.cli.flags import did_you_mean
from kvmesh.cli.messages.decoding import KINDS, REQUESTS
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh tail [SUBJECT …] [options]"
    parser.epilog = (
        "Kinds: kv (KV events), route (decisions and outcomes), seq (active sequences), instances, "
        "load, out (tokens), computing (blocks being computed), limits (use of API keys), "
        "wake (requests that wait for a worker of an idle model), and the "
        f"requests {', '.join(REQUESTS)}. While requests are tailed, NATS counts this command as "
        "their responder: senders detect a dead process by its lease or a timeout instead of at "
        "once."
    )
    parser.add_argument(
        "subject",
        nargs="*",
        type=pattern,
        metavar="SUBJECT",
        help="kv, 'kv.demo.*', '>' … [default kv route seq instances]",
    )
    parser.add_argument(
        "--json", action="store_true", help="print whole messages, one JSON object per line"
    )
    add_since(parser, "replay kv, route and seq first, from 90s, 5m, 2h, 1d ago or a time")
    parser.add_argument(
        "--no-follow", action="store_true", help="with --since: stop after the replay"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N messages")


def pattern(text: str) -> str:
    """A NATS subject, within the mesh (KIND…) or whole (ROOT.NAMESPACE.KIND…)."""
    if not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", text):
        raise argparse.ArgumentTypeError(f"not a subject: {text!r}")
    if text.startswith(f"{ROOT}.") and text.count(".") < 2:
        raise argparse.ArgumentTypeError(f"a whole subject needs a namespace and a kind: {text}")
    kind = text.split(".")[2 if text.startswith(f"{ROOT}.") else 0]
    if kind not in ("*", ">", *KINDS):
        raise argparse.ArgumentTypeError(
            f"unknown kind of message {kind}{did_you_mean(kind, KINDS)}"
        )
    return text


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.no_follow and arguments.since is None:
        return failed("tail", "--no-follow needs --since", 2)
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.messages.tailing import BusTail, LineFormat, TailFilter

    filters = TailFilter(
        arguments.subject, arguments.since, not arguments.no_follow, arguments.limit
    )
    line_format = LineFormat(arguments.json, colour=sys.stdout.isatty())
    return run_on_bus(
        "tail", settings, lambda bus: BusTail(bus, filters, line_format, settings).run()
    )
