"""`kvmesh replay`: sends a trace to a mesh over HTTP and measures latencies."""

import argparse
import os

from kvmesh.cli.arguments import positive, result_file
from kvmesh.cli.traces.options import SOURCES, add_trace_options, read_options
from kvmesh.settings import Settings
from kvmesh.workload.replay.replay import run as replay


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s TRACE … [options]"
    parser.add_argument("trace", nargs="+", metavar="TRACE", help=SOURCES)
    url = os.environ.get("KVMESH_URL") or "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help="server [KVMESH_URL] (%(default)s)")
    parser.add_argument("--model", help="model name (the first that the server lists)")
    parser.add_argument("--limit", type=positive, metavar="N", help="send the first N only")
    parser.add_argument(
        "--speed",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="arrivals and waits X times faster (%(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=256,
        metavar="N",
        help="limit of requests in flight; further ones are sent late (%(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=above_zero,
        default=300.0,
        metavar="S",
        help="fail a request after S seconds without data (%(default)s)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="API key for the server [OPENAI_API_KEY]",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of prompts and profiles; prompts of two seeds share no prefix (%(default)s)",
    )
    parser.add_argument(
        "--json", type=result_file, metavar="FILE", help="write the figures as JSON"
    )
    add_trace_options(parser)


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return replay(arguments, read_options(arguments))
