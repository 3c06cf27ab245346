"""Makes the processes of `kvmesh up` as forks of one process that has imported their code.

Forks share the memory of what is imported, and start without importing it again. The server is a
fork of the supervisor from before the latter has an event loop, threads or open files; it has none
either. Each process that it makes is a child of the supervisor, like one that runs a new program.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from kvmesh.cli.supervisor.forks.command_line import CommandLineError, show_command_line
from kvmesh.cli.supervisor.plan import ProcessSpec

REPLY_S = 5.0
MOST_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
Run = Callable[[str], int]


class ServiceForks:
    """The supervisor's side of the server; `close` ends it, and leaves its forks alone."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self._pid = pid
        self._channel: socket.socket | None = channel

    @classmethod
    def start(cls, prepare: Callable[[], None], run: Run) -> "ServiceForks | None":
        """Call `prepare`, which imports, and fork the server; a process calls `run` with its role.

        None where processes cannot be made in this way. Returns in the supervisor only.
        """
        if sys.platform != "linux":
            return None
        gc.disable()  # collections would find nothing of what is imported
        prepare()
        gc.freeze()  # a collection must not write to what is shared
        gc.enable()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        supervisor = os.getpid()
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            channel.close()
            sys.exit(run(_serve(theirs, supervisor)))
        theirs.close()
        channel.settimeout(REPLY_S)
        return cls(pid, channel)

    def fork(self, spec: ProcessSpec, output: int) -> int | None:
        """Make a process with the file `output` as its output; returns its id.

        None if that is impossible: then the caller runs a new program.
        """
        if self._channel is None:
            return None
        order = msgspec.msgpack.encode(spec)
        _adopt(True)  # the process between, which the server forks, ends at once
        try:
            socket.send_fds(self._channel, [order], [output])
            answer = self._channel.recv(MOST_BYTES)
        except OSError:
            answer = b""
        finally:
            _adopt(False)
        if answer:
            return int(answer)
        self.close()
        return None

    def close(self) -> None:
        """End the server."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _adopt(orphans: bool) -> None:
    """Make orphaned descendants children of this process, or of init as usual."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(orphans))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(channel: socket.socket, supervisor: int) -> str:
    """Make a process for each order, to the end; returns the role in each of them."""
    os.setsid()  # a terminal's Ctrl-C is for the supervisor
    _end_with(supervisor)
    keep = channel.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        show_command_line((sys.executable, "-m", __name__), os.environ)
    except CommandLineError:  # nor could the processes show theirs
        os._exit(0)
    while True:
        message, files, _, _ = socket.recv_fds(channel, MOST_BYTES, 1)
        if not files:  # the supervisor has closed its side
            os._exit(0)
        (output,) = files
        between = os.fork()
        if not between:
            order = msgspec.msgpack.decode(message, type=ProcessSpec)
            _become(order, output, channel, supervisor)
            return order.role
        os.close(output)
        os.waitpid(between, 0)


def _become(order: ProcessSpec, output: int, channel: socket.socket, supervisor: int) -> None:
    """Fork again, and be the process of the order: a child of the supervisor, which gets its id."""
    ending = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    os.setsid()
    select.select([ending], [], [])  # then the supervisor has adopted this process
    os.close(ending)
    _end_with(supervisor)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(order.env)
    show_command_line(order.argv, order.env)
    with channel:
        channel.send(b"%d" % os.getpid())


def _end_with(supervisor: int) -> None:
    """Have the kernel kill this process when its parent, the supervisor, ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
