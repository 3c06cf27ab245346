"""`kvmesh fanout`: simulates how a model's weights reach workers that start together."""

import argparse
import math
import sys
from typing import get_args

from kvmesh.cli.arguments import positive
from kvmesh.settings import Settings
from kvmesh.simulator.options import SimulationError
from kvmesh.simulator.report.fanout import compare, fanout_table
from kvmesh.simulator.weights.options import FanoutOptions, Fault
from kvmesh.terminal.console import stdout_console

DEFAULTS = FanoutOptions()
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def amount(text: str) -> int:
    """Bytes, with a unit (`8Mi`, `1.25G`)."""
    number = text.rstrip("KMGTi")
    try:
        value = float(number) * _UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        value = math.nan
    if not 1 <= value < 2**60:
        raise argparse.ArgumentTypeError(f"not a number of bytes (8Mi, 1.25G): {text!r}")
    return int(value)


def counts(text: str) -> list[int]:
    """Positive integers, separated by commas."""
    return [positive(part) for part in text.split(",")]


def fault(text: str) -> tuple[Fault, float]:
    """A kind and a share of the workers (`killed:0.1`)."""
    kind, _, share = text.partition(":")
    for known in get_args(Fault):
        if kind == known:
            try:
                return known, float(share)
            except ValueError:
                break
    kinds = ", ".join(get_args(Fault))
    raise argparse.ArgumentTypeError(f"expected KIND:SHARE with KIND one of {kinds}: {text!r}")


def wave(text: str) -> tuple[int, float]:
    """A number of targets and the seconds between waves (`16:2`)."""
    count, _, seconds = text.partition(":")
    try:
        return positive(count), float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected COUNT:SECONDS: {text!r}") from None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--targets", type=counts, default=[1, 8, 64], metavar="N,…", help="workers that start"
    )
    parser.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="workers that have the weights"
    )
    parser.add_argument(
        "--size", type=amount, default=DEFAULTS.size, metavar="BYTES", help="size of the weights"
    )
    parser.add_argument(
        "--chunk", type=amount, default=DEFAULTS.chunk_bytes, metavar="BYTES", help="chunk size"
    )
    parser.add_argument(
        "--link",
        type=amount,
        default=int(DEFAULTS.link_bytes_per_s),
        metavar="BYTES",
        help="bytes/s of each worker's link, in each direction",
    )
    parser.add_argument(
        "--central",
        type=amount,
        default=int(DEFAULTS.central_bytes_per_s),
        metavar="BYTES",
        help="bytes/s of the central store",
    )
    parser.add_argument(
        "--wave", type=wave, default=(0, 0.0), metavar="COUNT:SECONDS", help="start in waves"
    )
    parser.add_argument(
        "--fault",
        type=fault,
        action="append",
        default=[],
        metavar="KIND:SHARE",
        help="killed, frozen, slow or lying, and the share of workers that it strikes",
    )
    parser.add_argument("--sample", type=positive, default=DEFAULTS.sample, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    del settings
    try:
        runs = [
            FanoutOptions(
                targets=targets,
                seeds=arguments.seeds,
                size=arguments.size,
                chunk_bytes=arguments.chunk,
                link_bytes_per_s=arguments.link,
                central_bytes_per_s=arguments.central,
                wave=arguments.wave[0],
                wave_s=arguments.wave[1],
                faults=dict(arguments.fault),
                sample=arguments.sample,
                seed=arguments.seed,
            )
            for targets in arguments.targets
        ]
        results = [(options, compare(options)) for options in runs]
    except SimulationError as error:
        print(f"kvmesh fanout: {error}", file=sys.stderr)
        return 2
    fanout_table(results).show(stdout_console())
    return 0
