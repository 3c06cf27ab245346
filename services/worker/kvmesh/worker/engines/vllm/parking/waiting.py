"""The side of a parked rank: it blocks on a socket until its worker is promoted."""

import socket

from kvmesh.worker.engines.vllm.parking.gate import GO


class ParkingEnded(Exception):
    """The worker that parked this rank is gone, or ends it."""


def wait_at(path: str) -> None:
    """Block until the worker is promoted; raises ParkingEnded."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.connect(path)
            if channel.recv(len(GO), socket.MSG_WAITALL) == GO:
                return
    except OSError as error:
        raise ParkingEnded(f"the parked worker is gone: {error}") from error
    raise ParkingEnded("the worker that parked this rank is gone, or ends it")
