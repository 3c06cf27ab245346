"""Transfer of bytes between the memories of two processes, over NIXL or TCP."""

from kvmesh.transfer.errors import TransferError
from kvmesh.transfer.grants import Grant, LentBytes, LentFile, LentView, Region
from kvmesh.transfer.line import Line
from kvmesh.transfer.pace import SendingPace
from kvmesh.transfer.transport import Transport

__all__ = [
    "Grant",
    "LentBytes",
    "LentFile",
    "LentView",
    "Line",
    "Region",
    "SendingPace",
    "TransferError",
    "Transport",
]
