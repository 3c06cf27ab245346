"""Runs a `kvmesh` command in a pseudo-terminal, presses keys, and waits for its screen."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping

from support.forks import Fork
from support.wait import PATIENCE_S

_SEQUENCES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[()][A-Z0-9])")
_KEPT = 20_000


class Terminal:
    """A command in a terminal of 20 lines and `columns` columns."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], columns: int = 200) -> None:
        self._main, shell = pty.openpty()
        fcntl.ioctl(shell, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))
        self._shell = shell
        self._mode = termios.tcgetattr(shell)
        with open(shell, "r+b", buffering=0, closefd=False) as file:
            env = {**env, "TERM": "xterm-256color"}
            self._process = Fork(arguments, env, file, file, stdin=file)
        self.output = ""

    def shows(self, text: str) -> None:
        """Wait until the command writes `text` after what was waited for before."""
        ends = time.monotonic() + PATIENCE_S
        while text not in self.output:
            if time.monotonic() > ends:
                raise AssertionError(f"{text!r} is not in {self.output[-3000:]!r}")
            self._read()
        self.output = self.output.partition(text)[2]

    def press(self, keys: str) -> None:
        """Press keys; what the command has written before is forgotten."""
        while self._read(0.0):
            pass
        self.output = ""
        os.write(self._main, keys.encode())

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for the end; returns the exit status. The terminal's mode must be as before."""
        ends = time.monotonic() + PATIENCE_S
        while (status := self._process.poll()) is None:
            if time.monotonic() > ends:
                raise AssertionError(f"still runs: {self.output[-3000:]!r}")
            self._read()
        while self._read(0.0):
            pass
        assert termios.tcgetattr(self._shell) == self._mode
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)
        os.close(self._shell)

    def _read(self, timeout: float = 0.1) -> bool:
        if not select.select([self._main], [], [], timeout)[0]:
            return False
        text = os.read(self._main, 65536).decode(errors="replace")
        self.output = (self.output + _SEQUENCES.sub("", text))[-_KEPT:]
        return True
