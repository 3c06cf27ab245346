"""Kinds of arguments that several commands take."""

import argparse
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a number from 1: {text!r}")
    return int(text)


def moment(text: str) -> datetime:
    """`5m` ago, or an ISO 8601 time (local unless it says otherwise)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    try:
        if match:
            return datetime.now(UTC) - timedelta(seconds=float(match[1]) * UNITS[match[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"neither 90s, 5m, 2h, 1d nor a time: {text}") from None


def result_file(text: str) -> Path:
    """A file to write when the work is done: that its folder is missing must be known before."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    return file
