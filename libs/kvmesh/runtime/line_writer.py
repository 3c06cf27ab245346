"""Writes lines to a stream in a thread, so that a slow or frozen reader delays no caller."""

import fcntl
import os
import stat
import struct
import termios
import threading
from collections import deque

LIMIT = 10_000  # lines that wait
BATCH_S = 0.05  # between two writes
CHUNK = 4096  # bytes of one write
MAX_UNREAD = 16 << 10  # bytes in a pipe; the rest of it is left to other lines of the process


class LineWriter:
    """Lines for a file descriptor. Beyond LIMIT waiting ones, further lines are dropped.

    Of dropped lines, the next one that is written tells the number. A pipe is never filled: what
    else the process writes there would wait for its reader.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="line writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Write a line, without its end, soon."""
        if len(self._lines) >= LIMIT:
            self._dropped += 1
            return
        if self._dropped:
            self._lines.append(f"{self._dropped} lines were dropped: nobody reads them")
            self._dropped = 0
        self._lines.append(line)
        if not self._wake.is_set():  # the thread clears it before it takes the lines
            self._wake.set()

    def close(self, timeout: float) -> None:
        """Write the lines that wait, for at most `timeout` seconds."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set() or self._lines:
            self._wake.wait()
            self._wake.clear()
            data = "".join(f"{self._lines.popleft()}\n" for _ in range(len(self._lines))).encode()
            try:
                self._write(data)
            except OSError:  # the reader is gone: there is nobody to tell
                return
            self._stopping.wait(BATCH_S)

    def _write(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            while self._is_pipe and _unread(self._fd) > MAX_UNREAD:
                if self._stopping.wait(BATCH_S):
                    return
            at += os.write(self._fd, data[at : at + CHUNK])


def _unread(fd: int) -> int:
    """Bytes in a pipe that nobody has read."""
    packed = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int(struct.unpack("i", packed)[0])
