"""Argument types and failures, shared by several commands."""

import argparse
import math
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a positive integer: {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")
    return value


def moment(text: str) -> datetime:
    """A time as an age (`90s`, `5m`, `2h`, `1d`) or in ISO 8601 (local time without an offset)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    now = datetime.now(UTC)
    try:
        if match:
            return now - timedelta(seconds=float(match[1]) * UNITS[match[2]])
        time = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"neither an age (90s, 5m, 2h, 1d) nor a time: {text}"
        ) from None
    if time > now:
        raise argparse.ArgumentTypeError(f"a time in the future: {text}")
    return time


def add_since(parser: argparse.ArgumentParser, text: str, default: str | None = None) -> None:
    """Add `--since AGO`."""
    parser.add_argument("--since", type=moment, default=default, metavar="AGO", help=text)


def result_file(text: str) -> Path:
    """A file to write at the end; a missing folder is an error at once, not after the work."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {file.parent}")
    return file


def failed(command: str, reason: object, status: int = 1) -> int:
    """Print why a command failed; returns its exit status."""
    print(f"kvmesh {command}: {reason}", file=sys.stderr)
    return status
