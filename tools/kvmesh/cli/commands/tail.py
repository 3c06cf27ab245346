"""`kvmesh tail`: what passes over the bus, decoded, one line per message."""

import argparse
import re
import sys
from datetime import UTC, datetime, timedelta

from kvmesh.bus.subjects import ROOT
from kvmesh.settings import Settings

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh tail [SUBJECT …] [options]"
    parser.epilog = (
        "Kinds: kv (KV events), route (decisions and outcomes), seq (active sequences), instances, "
        "load, out (tokens), and the requests index, router, work, ctl. While requests are "
        "watched, NATS takes the watcher for a listener: senders learn of a dead process by "
        "its lease or a timeout instead of at once."
    )
    parser.add_argument(
        "subject",
        nargs="*",
        type=pattern,
        metavar="SUBJECT",
        help="kv, 'kv.demo.*', '>' … [default kv route seq instances]",
    )
    parser.add_argument("--json", action="store_true", help="whole messages, one JSON object each")
    parser.add_argument(
        "--since",
        type=moment,
        metavar="AGO",
        help="first replay the streams (kv, route, seq) from then on: 90s, 5m, 2h, 1d or a time",
    )
    parser.add_argument(
        "--no-follow", action="store_true", help="with --since: stop at the present"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N messages")


def pattern(text: str) -> str:
    """A subject of NATS: tokens between dots, whole ones with namespace and kind."""
    if not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", text):
        raise argparse.ArgumentTypeError(f"not a subject: {text!r}")
    if text.startswith(f"{ROOT}.") and text.count(".") < 2:
        raise argparse.ArgumentTypeError(f"a whole subject has a namespace and a kind: {text}")
    return text


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a number from 1: {text!r}")
    return int(text)


def moment(text: str) -> datetime:
    """`5m` ago, or an ISO 8601 time (local unless it says otherwise)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match:
        return datetime.now(UTC) - timedelta(seconds=float(match[1]) * UNITS[match[2]])
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise argparse.ArgumentTypeError(f"neither 90s, 5m, 2h, 1d nor a time: {text}") from None


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.session import run_on_bus
    from kvmesh.cli.tailing import Form, Tail, Wanted

    wanted = Wanted(arguments.subject, arguments.since, not arguments.no_follow, arguments.limit)
    form = Form(arguments.json, colour=sys.stdout.isatty())
    return run_on_bus("tail", settings, lambda bus: Tail(bus, wanted, form, settings).run())
