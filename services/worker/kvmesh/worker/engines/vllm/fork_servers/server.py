"""Main program of a fork server: it imports modules, and makes processes that have them.

It ends once its standard input has ended and its last process has.
"""

import ctypes
import fcntl
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
import types
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import BinaryIO, NoReturn

from kvmesh.worker.engines.vllm.fork_servers.protocol import (
    FORKED,
    STOPPED,
    ForkRequest,
    receive_request,
)

log = logging.getLogger(__name__)
REQUEST_S = 5.0
RESERVED = 256  # numbers of file descriptors that belong to the processes to be made
PR_SET_PDEATHSIG = 1
BEGIN = b"b"


class ForkServer:
    """Makes the processes that launchers ask for."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener: socket.socket | None = listener
        self._selector = selectors.EpollSelector()
        self._polling = self._selector.fileno()
        self._channels: dict[int, socket.socket] = {}  # by process
        self._launchers: dict[int, int] = {}
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def serve(self) -> ForkRequest | None:
        """Serve to the end; returns in each new process, too, with what it must do."""
        while self._listener is not None or self._channels:
            for key, _ in self._selector.select():
                if self._listener is not None and key.fileobj is self._listener:
                    request = self._accept(self._listener)
                    if request is not None:
                        return request
                elif key.fileobj is sys.stdin:
                    if not os.read(key.fd, 1):
                        self._close()
                elif key.fd == self._woken:
                    with suppress(BlockingIOError):
                        os.read(self._woken, 1 << 12)
                    self._reap()
                elif key.data in self._channels:  # not of a process that has just ended
                    self._pass_on(key.data)
        return None

    def _accept(self, listener: socket.socket) -> ForkRequest | None:
        """In the new process, the request; in the server, None."""
        channel = _moved(listener.accept()[0])
        channel.settimeout(REQUEST_S)
        request: ForkRequest | None = None
        try:
            request = receive_request(channel)
            if unfit := self._taken(request):
                raise ValueError(f"file descriptors {unfit} are in use")
            child, begin = _fork()
        except (OSError, ValueError, TypeError) as error:
            log.warning("a process is made without the fork server: %s", error)
            _close_all(request.descriptors if request is not None else ())
            channel.close()
            return None
        if not child:
            begin.close()
            self._leave(channel)
            return request
        _close_all(request.descriptors)
        self._channels[child] = channel
        self._launchers[child] = request.process
        self._selector.register(channel, selectors.EVENT_READ, child)
        with begin:
            try:  # a launcher that has given up makes the process itself
                channel.sendall(FORKED)
                channel.setblocking(False)
                begin.write(BEGIN)
            except OSError:
                os.kill(child, signal.SIGKILL)
        return None

    def _taken(self, request: ForkRequest) -> list[int]:
        """Numbers that the process needs, and which modules use here."""
        own = {each.fileno() for each in self._channels.values()}
        own |= {self._polling, self._woken, self._wake, 0, 1, 2}
        own |= {self._listener.fileno()} if self._listener is not None else set()
        return [
            number
            for number in request.numbers
            if number not in own and number not in request.descriptors and _is_open(number)
        ]

    def _leave(self, channel: socket.socket) -> None:
        """In a new process: be no server."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for each in (self._listener, channel, *self._channels.values()):
            if each is not None:
                each.close()
        os.close(self._woken)
        os.close(self._wake)

    def _pass_on(self, child: int) -> None:
        """Send the process the signals that its launcher got; a launcher that died kills it."""
        try:
            numbers = self._channels[child].recv(64)
        except BlockingIOError:
            return
        except OSError:
            numbers = b""
        for number in numbers or (signal.SIGKILL,):
            os.kill(child, number)
        if not numbers:
            self._selector.unregister(self._channels[child])

    def _reap(self) -> None:
        options = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        while self._channels:
            try:
                child, status = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if not child:
                return
            if child not in self._channels:  # of an imported module
                continue
            if os.WIFSTOPPED(status):
                self._tell(child, STOPPED)
            elif os.WIFCONTINUED(status):
                with suppress(ProcessLookupError):
                    os.kill(self._launchers[child], signal.SIGCONT)
            else:
                self._tell(child, b"%d\n" % status)
                channel = self._channels.pop(child)
                with suppress(KeyError):
                    self._selector.unregister(channel)
                channel.close()
                del self._launchers[child]

    def _tell(self, child: int, line: bytes) -> None:
        with suppress(OSError):
            self._channels[child].send(line)

    def _close(self) -> None:
        """Make no more processes."""
        self._selector.unregister(sys.stdin)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None


def main() -> None:
    """Run with the number of a listening socket, then the names of modules or functions."""
    number, *names = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: processes get it themselves
    listener = _moved(socket.socket(fileno=int(number)))
    reserved = [os.dup(listener.fileno()) for _ in range(RESERVED)]
    _import(names)
    for descriptor in reserved:
        os.close(descriptor)
    gc.collect()
    gc.freeze()
    server = ForkServer(listener)
    request = server.serve()
    if request is not None:
        run(request)
    os._exit(0)  # modules that nothing used have nothing to end, and would log that


def run(request: ForkRequest) -> NoReturn:
    """Be the process that the request describes, to its end."""
    _place(request.descriptors, request.numbers)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    at = request.arguments.index("-c")
    sys.argv = ["-c", *request.arguments[at + 2 :]]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 1
    try:
        exec(compile(request.arguments[at + 1], "<string>", "exec"), module.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # what exists since before the fork is not this process's to end


def _import(names: Iterable[str]) -> None:
    for name in names:
        module, _, function = name.partition(":")
        try:
            imported = import_module(module)
            if function:
                getattr(imported, function)()
        except RuntimeError as error:
            log.warning("the fork server ends: %s", error)
            sys.exit(1)
        except Exception as error:  # a module may raise any type
            log.warning("not imported ahead: %s: %r", name, error)


def _fork() -> tuple[int, BinaryIO]:
    """Fork; the new process waits for BEGIN in the returned file, and dies with this one."""
    parent = os.getpid()
    wait, begin = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries are idle
        child = os.fork()
    if child:
        os.close(wait)
        return child, os.fdopen(begin, "wb")
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(begin)
    if os.getppid() != parent or os.read(wait, len(BEGIN)) != BEGIN:
        os._exit(1)
    return child, os.fdopen(wait, "rb")


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _moved(given: socket.socket) -> socket.socket:
    """The same socket with a number that no process needs."""
    number = fcntl.fcntl(given.fileno(), fcntl.F_DUPFD_CLOEXEC, RESERVED)
    given.close()
    return socket.socket(fileno=number)


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give file descriptors their numbers."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 2 * RESERVED) for each in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
