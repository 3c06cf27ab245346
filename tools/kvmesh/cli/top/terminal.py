"""The keys of a terminal, one by one and without echo; the terminal's mode is restored."""

import asyncio
import logging
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvmesh.cli.top.controls import split_keys

MAX_BYTES = 256


@contextmanager
def keys(handle: Callable[[str], None], closed: Callable[[], None]) -> Iterator[None]:
    """Pass each key to `handle`; `closed` runs when the terminal is gone or SIGTERM arrives."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        try:
            data = os.read(descriptor, MAX_BYTES)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(descriptor)
            closed()
        for key in split_keys(data.decode(errors="replace")):
            handle(key)

    ends = (signal.SIGTERM, signal.SIGHUP)
    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, read)
        for number in ends:
            loop.add_signal_handler(number, closed)
        loop.add_signal_handler(signal.SIGTSTP, _ignore)  # the shell would get this screen
        yield
    finally:
        for number in (*ends, signal.SIGTSTP):
            loop.remove_signal_handler(number)
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def _ignore() -> None:
    pass


class LastWarning(logging.Handler):
    """Keeps the latest warning for the screen, on which log lines have no place."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
