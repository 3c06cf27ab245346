"""The options of reading a trace, in each command that takes one."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from kvmesh.cli.arguments import UNITS, positive
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions, TimeUnit, Turns

SOURCES = (
    "trace files or folders of one format, an agent profile (.toml) or a shipped profile such as"
    " `demo` (docs/workloads.md)"
)


def span(text: str) -> float:
    """Seconds of a duration such as `90`, `90s`, `5m`, `2h` or `1d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"not a duration (90s, 5m, 2h, 1d): {text!r}")
    return float(match[1]) * UNITS[match[2] or "s"]


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading of a trace")
    group.add_argument("--repair", action="store_true", help="repair an invalid trace")
    group.add_argument(
        "--turns",
        choices=get_args(Turns),
        help="later rows of a session hold the whole prompt, or add to it (by their contents)",
    )
    group.add_argument(
        "--time-unit", choices=get_args(TimeUnit), help="unit of the trace's times (its format's)"
    )
    group.add_argument(
        "--trace-block-size",
        type=positive,
        metavar="N",
        help="tokens per block id of the trace (its format's)",
    )
    group.add_argument(
        "--from", dest="begin", type=span, default=0.0, metavar="T",
        help="leave out what begins before T: 90s, 5m, 2h, 1d after the first request",
    )  # fmt: skip
    group.add_argument(
        "--to", dest="end", type=span, metavar="T", help="leave out what begins at T or later"
    )
    group.add_argument(
        "--max-wait", type=span, metavar="T", help="shorten longer waits between turns to T"
    )


def read_options(arguments: argparse.Namespace) -> ReadOptions:
    return ReadOptions(
        turns=arguments.turns,
        time_unit=arguments.time_unit,
        trace_block_size=arguments.trace_block_size,
        begin_s=arguments.begin,
        end_s=arguments.end,
        max_wait_s=arguments.max_wait,
    )


def load_trace(
    arguments: argparse.Namespace, sources: str | Sequence[str], seed: int = 0
) -> tuple[Workload, str]:
    """The workload, and a line about the trace that it was read from, if any.

    Prints assumptions and repairs to stderr. Raises WorkloadError or OSError.
    """
    workload, repairs = load(sources, arguments.repair, seed, read_options(arguments))
    for line in repairs.lines():
        print(line, file=sys.stderr)
    return workload, repairs.summary


def title_of(sources: Sequence[str]) -> str:
    """The sources as the title of a report."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{Path(sources[0]).name}{more}"
