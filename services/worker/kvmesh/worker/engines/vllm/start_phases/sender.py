"""Sends the phases of this process, or why it ends, to the worker that started vLLM.

A datagram has one of them.

Nothing is sent unless a worker listens, and nothing waits longer than SEND_S.
"""

import logging
import os
import socket
import time

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)
SOCKET_VARIABLE = "KVMESH_START_SOCKET"  # inherited by vLLM's processes
SEND_S = 0.2
MOST_ERROR = 600  # characters
_encoder = msgspec.msgpack.Encoder()


class PhaseReport(Struct, frozen=True, kw_only=True, array_like=True):
    """A phase of the process `pid`, in seconds of the machine's monotonic clock.

    `ended` is None when it begins. An `outer` phase has others within it, which count first. With
    an `error` the process ends in this phase.
    """

    pid: int
    phase: str
    began: float
    ended: float | None = None
    outer: bool = False
    error: str = ""


def record(name: str, began: float, ended: float, outer: bool = False) -> None:
    """Tell the worker that a `StartPhase` of this process lasted from `began` to `ended`.

    The times are Unix times in seconds. Callable from any thread of any vLLM process; does nothing
    unless a worker listens.
    """
    shift = time.monotonic() - time.time()
    _send(name, began + shift, ended + shift, outer)


def enter(name: str) -> None:
    """Tell the worker that a `StartPhase` of this process begins now."""
    _send(name, time.monotonic(), None, False)


def record_since(name: str, began: float) -> None:
    """As `record`, from the monotonic time `began` until now."""
    _send(name, began, time.monotonic(), False)


def fail(error: BaseException) -> None:
    """Tell the worker that the start of this process ends with an error."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    _send("", time.monotonic(), None, False, text[:MOST_ERROR])


def listening() -> bool:
    """True if a worker may listen."""
    return SOCKET_VARIABLE in os.environ


def _send(name: str, began: float, ended: float | None, outer: bool, error: str = "") -> None:
    path = os.environ.get(SOCKET_VARIABLE)
    if path is None:
        return
    report = PhaseReport(
        pid=os.getpid(), phase=name, began=began, ended=ended, outer=outer, error=error
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(SEND_S)
            channel.sendto(_encoder.encode(report), path)
    except (FileNotFoundError, ConnectionRefusedError):  # the start is over
        os.environ.pop(SOCKET_VARIABLE, None)
    except OSError as error:
        log.debug("the worker does not learn how long %s took: %s", name, error)
