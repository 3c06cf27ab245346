"""The side of a rank at the gate: it waits in the system, without using a processor."""

import socket

from kvmesh.worker.engines.vllm.parking.gate import GO


class TurnedAway(Exception):
    """The worker that started this rank is gone, or does not want it any more."""


def wait_at(path: str) -> None:
    """Wait without a limit for leave to go on; raises TurnedAway."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.connect(path)
            if channel.recv(len(GO), socket.MSG_WAITALL) == GO:
                return
    except OSError as error:
        raise TurnedAway(f"the parked worker is gone: {error}") from error
    raise TurnedAway("the worker that parked this rank is gone, or ends it")
