"""Program that multiprocessing runs in place of Python: a fork server makes the process instead.

The new process is a child of the server. This one, which the caller knows, passes its signals on,
stops when the other one is stopped, and ends as it ends. Without a server of its environment, it
becomes an ordinary interpreter.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from kvmesh.worker.engines.vllm.fork_servers.environments import fingerprint
from kvmesh.worker.engines.vllm.fork_servers.protocol import (
    FLAG,
    FOLDER_OF_REQUESTS,
    FORKED,
    STOPPED,
    ForkRequest,
    send_request,
)

IMPORTED_S = 90.0  # a server answers once it has imported everything
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
OWN_ERROR = 70


def main() -> None:
    """Run with a folder, then the arguments that Python would get."""
    descriptors = _descriptors()
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    if FLAG in arguments:
        _note(folder)
        request = ForkRequest(
            arguments, dict(os.environ), os.getcwd(), descriptors, os.getpid(), descriptors
        )
        channel = _ask(folder / fingerprint(os.environ), request)
        if channel is not None:
            _follow(channel)
    os.execv(sys.executable, [sys.executable, *arguments])


def _descriptors() -> list[int]:
    """The inherited file descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            os.fstat(int(name))
            found.append(int(name))
    return sorted(found)


def _note(folder: Path) -> None:
    """Leave the environment for the next start's servers."""
    with suppress(OSError):
        file = folder / FOLDER_OF_REQUESTS / str(os.getpid())
        file.write_text(json.dumps(dict(os.environ)))


def _ask(path: Path, request: ForkRequest) -> socket.socket | None:
    """The channel to a server that has made the process; None if there is none."""
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(IMPORTED_S)
    try:
        channel.connect(str(path))
        send_request(channel, request)
        answer = _answer(channel)
    except (OSError, ValueError):
        answer = b""
    if answer == FORKED:
        return channel
    channel.close()
    return None


def _answer(channel: socket.socket) -> bytes:
    """The server's answer in time; from then on, it can answer no more. Raises OSError."""
    try:
        return channel.recv(len(FORKED), socket.MSG_WAITALL)
    except TimeoutError:
        channel.shutdown(socket.SHUT_RD)
        channel.setblocking(False)
        return channel.recv(len(FORKED))


def _follow(channel: socket.socket) -> None:
    """End as the process ends."""
    channel.settimeout(None)

    def forward(number: int, _: object) -> None:
        with suppress(OSError):
            channel.send(bytes([number]))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the process, too
    for number in FORWARDED:
        signal.signal(number, forward)
    with channel.makefile("rb") as lines:
        for line in lines:
            if line == STOPPED:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                _end(int(line))
    _end(OWN_ERROR << 8)  # the server has died, and its children with it


def _end(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else OWN_ERROR)


if __name__ == "__main__":
    main()
